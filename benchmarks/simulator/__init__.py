"""A run in virtual time: the control plane's real code, with engines and a trainer that are models of their speed.

clock        an event loop whose time passes only where everything waits
wire         calls between the parts, in place of HTTP
cores        the cores of one host, where processes have not one each
engine       a generation server: continuous batching by a model of its step time
lengths      how long answers are
trainer      a training step by a model of its time, and what stands in for the ModelWorkers
devices      the parameters of such models, derived from a model's and a device's figures
agents       what the RolloutWorkers roll out
faults       servers that are slow, die, fall silent or are taken away
run          all of it together; what comes out
scenarios    which runs the tables of docs/scale.md are made of
fit          the parameters of the embedded engine on this machine, and a real run beside its prediction
"""
