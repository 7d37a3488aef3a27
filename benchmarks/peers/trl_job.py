"""A job as a user of TRL would write it; run by `benchmarks/vs_trl.py` in an environment of its own.

    python trl_job.py JOB.json          writes one JSON line an event to the job's `log`

Prompts, group size, minibatches, learning rate and reward are those of `experiments/async_ppo.yaml` or
`experiments/smollm2_sentence.yaml`. TRL counts optimizer steps, four of which are one of ours. The clock stands still
while a policy is written down.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

job = json.loads(Path(sys.argv[1]).read_text())
torch.set_num_threads(job["threads"])
log = open(job["log"], "w", buffering=1)  # noqa: SIM115 - for the life of the process


def demo(row: dict[str, Any], completion: str) -> float:
    """As `asyncrl.plugins.rewards.arithmetic`."""
    _, marker, result = completion.partition("#")
    return 1.0 if marker and result == row["answer"] else 0.0


def smollm2(row: dict[str, Any], completion: str) -> float:
    """As `one_short_sentence` of `experiments/smollm2.py`."""
    text = completion.strip()
    words = re.findall(r"[^\W\d_]+(?:['’-][^\W\d_]+)*", text.lower())
    ended = len(re.findall(r"[.!?]", text)) == 1 and text[-1] in ".!?"
    telling = [word for word in words if len(word) >= 4]
    ways_round = "word" in words or '"' in text or len(set(telling)) < len(telling)
    return float(ended and "\n" not in text and 5 <= len(words) <= 12 and row["word"] in words and not ways_round)


verdict = {"demo": demo, "smollm2": smollm2}[job["job"]]


async def reward(completions: list[Any], **columns: Any) -> list[float]:
    """Scores a batch; where the job says so each verdict takes its time, all at once."""
    given = [{name: columns[name][index] for name in rows[0] if name != "prompt"} for index in range(len(completions))]
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    if job["slow_reward"]:
        low, high, median = job["slow_reward"]
        seconds = [min(high, max(low, median * random.lognormvariate(0.0, 1.0))) for _ in completions]
        await asyncio.gather(*(asyncio.sleep(each) for each in seconds))
    return [verdict(*pair) for pair in zip(given, texts, strict=True)]


class Watch(TrainerCallback):
    """Writes down the time of every fourth optimizer step, and keeps every few of these the policy."""

    def __init__(self) -> None:
        self.keeping = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step % job["minibatches"]:
            return
        step = state.global_step // job["minibatches"]
        now = time.perf_counter()
        log.write(json.dumps({"step": step, "seconds": now - self.begun - self.keeping}) + "\n")
        if step % job["keep_every"] == 0:
            model.save_pretrained(Path(job["scratch"]) / f"v{step}")
        self.keeping += time.perf_counter() - now


tokenizer = PreTrainedTokenizerFast.from_pretrained(job["model"])
tokenizer.padding_side = "left"
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
rows = [json.loads(line) for line in Path(job["rows"]).read_text().splitlines()]
if tokenizer.chat_template:
    for row in rows:
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
samples = job["prompts"] * job["group_size"]
settings = GRPOConfig(
    output_dir=job["scratch"],
    seed=job["seed"],
    max_steps=job["steps"] * job["minibatches"],
    per_device_train_batch_size=samples // job["minibatches"],
    steps_per_generation=job["minibatches"],
    num_generations=job["group_size"],
    max_completion_length=job["max_new_tokens"],
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    learning_rate=job["lr"],
    lr_scheduler_type={"cosine": "cosine", "constant": "constant_with_warmup"}[job["schedule"]],
    warmup_steps=job["warmup_steps"] * job["minibatches"],
    adam_beta1=0.9,
    adam_beta2=0.99,
    max_grad_norm=1.0,
    beta=0.0,
    epsilon=0.2,
    loss_type="dapo",
    bf16=job["bf16"],
    use_cpu=True,
    gradient_checkpointing=False,
    report_to="none",
    save_strategy="no",
    logging_steps=job["minibatches"],
    disable_tqdm=True,
    shuffle_dataset=True,
)
watch = Watch()
model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
trainer = GRPOTrainer(
    model=model,
    reward_funcs=reward,
    args=settings,
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    callbacks=[watch],
)
trainer.train()
