"""A run in virtual time: the control plane's real code, with engines and a trainer that are models of their speed.

clock        an event loop whose time passes only where everything waits
wire         calls between the parts, in place of HTTP
cores        the cores of one host, where processes have not one each
host         what computes there beside engines and trainer, and when a version is heard of
engine       a generation server: continuous batching by a model of its step time (`engine_model`)
lengths      how long answers are
trainer      a training step by a model of its time, and what stands in for the ModelWorkers
devices      the parameters of such models, derived from a model's and a device's figures
agents       what the RolloutWorkers roll out
faults       servers that are slow, die, fall silent or are taken away
setup        what is simulated, and what comes out
run          all of it together
scenarios    which runs the tables of docs/scale.md are made of
fit          real runs beside what a model of this machine predicts: `speed` measures the engine, `real` the runs
"""
