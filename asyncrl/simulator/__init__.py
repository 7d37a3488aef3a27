"""A run in virtual time: the control plane's real code, with engines and a trainer that are models of their speed.

    clock          event loop whose time passes only while everything waits
    wire           calls between the parts, in place of HTTP
    cores          cores of one host, for processes that have to share them
    host           work on that host besides engines and trainer, and the delay of announced versions
    engine         a generation server: continuous batching by a model of its step time (`engine_model`)
    lengths        lengths of answers
    trainer        a train step by a model of its time, and the receiving end of the ModelWorkers
    agents         agents of the RolloutWorkers
    faults         servers that are slow, die, fall silent or are taken away
    setup          inputs and outcome of a simulation
    run            all of it together
    measured_run   the rates of a real run, from its files, as a setup
    plan           which split of a number of devices, and which η, would be fastest for that run

`benchmarks/simulate.py` builds the tables of docs/scale_runs.md with it, `doctor RUN --plan` uses the last two.
"""
