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
    simulation the run as a whole plans/ the rates of a real run, from its files; the fastest split of devices, and the
    fastest η, for it

`benchmarks/simulate.py` builds the tables of docs/scale_runs.md with it, `doctor RUN --plan` uses `plans/`.
"""
