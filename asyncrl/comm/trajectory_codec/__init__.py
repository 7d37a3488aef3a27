"""Trajectories as messages: all arrays are joined end to end, so the cost depends on tokens, not on trajectories or
samples.

One message carries one or many trajectories, which share the cost of calls to numpy and msgpack. For the same reason
all data is in columns, whose types and bounds are checked for a whole column at a time.

A trajectory's prompt is the longest run of tokens that all its samples begin with and that no policy generated
(loss_mask 0, behave_logprobs 0, versions -1). It is sent once, and only as tokens: 4 bytes per token instead of 13 in
every sample.

Arrays, all in order. The message has R trajectories with S samples. P counts the tokens of prompts and T those after a
prompt.

    prompts          int32    [P]  at least 0
    tokens           int32    [T]  at least 0
    loss_mask        uint8    [T]  0 or 1
    behave_logprobs  float32  [T]  finite
    versions         int32    [T]  at least -1
    lengths          int64    [S]  tokens of each sample after the prompt, at least 0; at least 1 with the prompt's
    rewards          float64  [S]  finite
    truncated        uint8    [S]  0 or 1
    episodes         int32    [S]  at least 0
    sizes            int64    [R]  samples of each trajectory, at least 1
    prompt_lengths   int64    [R]  tokens of each prompt, at least 0

and these, each only if a trajectory of the message has such data. Beside each, `<name>_sizes` int64 [R] says how many
of its entries belong to each trajectory, 0 for one without such data:

    token_rewards    float32  of each sample's tokens after the prompt; finite, and 0 where loss_mask is 0
    groups           uint8    of each sample, position among the names of its header
    token_columns    float32  the columns that the header names, one after the other, each like token_rewards
    routing          uint8    experts by token, layer and place among the token's, little-endian, in the shape that the
                              header says: of its prompt, then of what follows
    pictures         uint8    the content of each of its pictures, once

Pictures that all samples begin with belong to the prompt; a prompt ends where pictures differ, and never within one.

Meta: a list of R `TrajectoryHeader`s, whose numbers are finite.

The bounds are checked once, by the receiver, which must not trust its input. The sender receives the refusal, so an
agent's mistake is raised in its own process. Decoded columns are read-only views into the message. Samples, with their
prompts repeated, are built from them only on request.
"""

from asyncrl.comm.trajectory_codec.decode import decode_each, decode_trajectories
from asyncrl.comm.trajectory_codec.encode import Prepared, encode_prepared, encode_trajectories, prepare

__all__ = [
    "Prepared",
    "decode_each",
    "decode_trajectories",
    "encode_prepared",
    "encode_trajectories",
    "prepare",
]
