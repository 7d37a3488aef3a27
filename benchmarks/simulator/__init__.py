"""A run in virtual time: the control plane's real code, with speed models in place of the engines and the trainer.

    clock            event loop whose time passes only while everything waits
    wire             calls between the parts, in place of HTTP
    setup            inputs and outcome of a simulation
    engine           continuous batching by a model of its step time
    servers          generation servers on it, and their faults
    manager          the manager and RolloutWorkers
    simulated_code   prompts, agents and environments of the RolloutWorkers
    master           the master's step, the ModelWorkers' receiving end, turns of servers on the trainer's devices
    simulation       the run as a whole

`benchmarks/simulate.py` prints tables with it, of which docs/results.md has the outcome:

    devices      the parameters of engine and trainer models, derived from a model's and a device's figures
    scenarios    which runs the tables are made of
"""
