"""A run in virtual time: the control plane's real code, with speed models in place of the engines and the trainer.

    clock            event loop whose time passes only while everything waits
    wire             calls between the parts, in place of HTTP
    host/            manager and RolloutWorkers, the cores that processes share, and the other work on one host
    servers/         generation servers: continuous batching by a model of its step time, lengths of answers, faults
    trainer          a train step by a model of its time, and the ModelWorkers' receiving end
    master_loop      the master's step
    device_turns     turns of the trainer and of servers on its devices
    simulated_code   prompts, agents and environments of the RolloutWorkers
    setup            inputs and outcome of a simulation
    simulation       the run as a whole

`benchmarks/simulate.py` prints tables with it, of which docs/results.md has the outcome:

    devices      the parameters of engine and trainer models, derived from a model's and a device's figures
    scenarios    which runs the tables are made of
    report       their tables and plot
    fit          real runs beside what a model of this machine predicts: `speed` measures the engine, `real` the runs
"""
