"""A run in virtual time: the control plane's real code, with speed models in place of the engines and the trainer.

    clock          event loop whose time passes only while everything waits
    wire           calls between the parts, in place of HTTP
    cores          cores of one host, for processes that share them
    host           other work on that host, and the delay of announced versions
    engine         a generation server: continuous batching by a model of its step time (`engine_model`)
    lengths        lengths of answers
    trainer        a train step by a model of its time, and the ModelWorkers' receiving end
    agents         agents of the RolloutWorkers
    faults         servers that are slow, die, fall silent or are taken away
    setup          inputs and outcome of a simulation
    run            all of it together
    measured_run   the rates of a real run, from its files, as a setup
    plan           the fastest split of a number of devices, and the fastest η, for that run

`benchmarks/simulate.py` builds the tables of docs/scale_runs.md with it, `doctor RUN --plan` uses the last two.
"""
