"""The engine: a batch on its own thread, and the requests of other threads to it.

Every request is a command that the engine's thread runs between two steps, so nothing in the batch needs a lock.
Without commands and runnable samples the thread sleeps on a condition.

A pause stops the steps. `abort` ends running samples with their partial output. `retract` sends them back to the queue,
to be prefilled again under the weights in force then. `in_place` freezes them with their cache. Later requests are
held.

A paused engine that runs nothing may release the memory of its weights and cache (`release_memory`). Before it
continues it allocates the memory again (`resume_memory`), and its weights are updated.

A weight update takes effect between two steps. A paused engine applies it at once. Otherwise it waits until the samples
that were there before it have finished, while later ones are held; or it aborts them, if asked to.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from asyncrl.config.memory import is_out_of_memory
from asyncrl.data.stop_strings import Decode
from asyncrl.inference.embedded.jobs import EngineStats, Job, JobTable
from asyncrl.inference.embedded.scheduler import AdmissionQueue, DecodeBatch, Mailbox
from asyncrl.inference.embedded.served_models import check_parity, longest_sequence
from asyncrl.inference.embedded.step import ModelRunner, PrefixForward
from asyncrl.inference.embedded.weights import ServedWeights, WeightUpdates
from asyncrl.inference.engine_io import EngineLimits, EngineStoppedError, GenerationOutput, MemoryStateError
from asyncrl.inference.messages import MemoryTag, PauseMode
from asyncrl.models.host_copies import own_storage
from asyncrl.models.torch_device import shortage
from asyncrl.models.transformers_internals import eos_token_ids
from asyncrl.weights.manifest import WeightUpdateError

if TYPE_CHECKING:
    from asyncrl.inference.embedded.memory import EngineMemory
    from asyncrl.models.pictures import Pictures

INTERVAL_S = 0.1
"""Interval in seconds between readings of a working engine."""
WINDOW_S = 1.0
"""Longest time in seconds between two readings that gives a speed: the first reading after a pause does not."""


class WorkMeter:
    """Receives, after every step, the time in seconds and the number of tokens generated so far."""

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        self.tokens_per_s = 0.0
        self._read_at = 0.0
        self._tokens = 0

    def worked(self, begin: float, end: float, tokens: int) -> bool:
        """Record a step from `begin` to `end`; return True if a reading was due."""
        self.busy_seconds += end - begin
        passed = end - self._read_at
        if passed <= INTERVAL_S:
            return False
        if passed < WINDOW_S:
            self.tokens_per_s = (tokens - self._tokens) / passed
        self._read_at, self._tokens = end, tokens
        return True


class Statistics:
    """Takes snapshots on the engine's thread; any thread may read the `latest`.

    Args:
        pictures: pictures of the model; None if it serves text alone.

    Attributes:
        latest: the newest snapshot, at most `INTERVAL_S` old while the engine works.
        due: something other than a step has changed the state, so that the next step takes a snapshot.
        retractions: samples that pauses sent back to the queue.
    """

    def __init__(self, batch: DecodeBatch, jobs: JobTable, limits: EngineLimits, pictures: Pictures | None) -> None:
        self._batch, self._jobs, self._limits, self._pictures = batch, jobs, limits, pictures
        self._prefilled_before = batch.prefills.forward.computed_tokens  # by the check of the model
        self._meter = WorkMeter()
        self.latest = EngineStats()
        self.due = True
        self.retractions = 0

    def worked(self, begin: float, end: float) -> None:
        """Record a step from `begin` to `end`; take a snapshot if one is due."""
        if self._meter.worked(begin, end, self._batch.counts.generated) or self.due:
            self.take(paused=False)

    def take(self, *, paused: bool) -> None:
        """Take a snapshot."""
        self.due = False
        batch = self._batch
        self.latest = EngineStats(
            running=batch.samples.live,
            waiting=batch.waiting,
            paused=paused,
            used_tokens=batch.used_tokens,
            max_total_tokens=self._limits.max_total_tokens,
            max_running_requests=self._limits.max_running_requests,
            prompt_tokens=batch.counts.prompt,
            cached_tokens=batch.counts.cached,
            generated_tokens=batch.counts.generated,
            prefilled_tokens=batch.prefills.forward.computed_tokens - self._prefilled_before,
            kept_tokens=batch.prefills.kept_tokens,
            finished_requests=self._jobs.finished,
            aborted_requests=self._jobs.aborted,
            retractions=self.retractions,
            steps=batch.steps,
            busy_seconds=self._meter.busy_seconds,
            gen_throughput=0.0 if paused or not batch.runnable else self._meter.tokens_per_s,
            weight_version=batch.version,
            encoded_pictures=0 if self._pictures is None else self._pictures.tower.encoded,
        )


logger = logging.getLogger(__name__)

CHUNKED_PREFILL_SIZE = 512
"""Default of `generation.chunked_prefill_size`."""


class GenerationEngine:
    """Continuous batching over a transformers causal LM.

    Args:
        model: a causal LM that keeps keys, values and recurrent states in transformers' cache; its results are compared
            with transformers' own here.
        max_running_requests: largest number of samples that are decoded together.
        max_model_len: longest prompt + output in tokens; default: the model's own limit.
        max_total_tokens: limit of the KV cache in positions, for running samples (rows x longest sample) and for what
            is kept of earlier requests. Default: all rows at their longest.
        weight_version: label of the model's weights.
        model_path: folder of the model's weights, the base of later adapters.
        detokenize: token ids to text; needed for stop strings.
        record_routing: requests may ask for the experts that each token went through.
        pictures: pictures of `model`; None if it serves text alone.
        chunked_prefill_size: most tokens of one prompt that are computed between two decode steps.
        saves_memory: the memory of the weights may be released.

    Raises:
        UnsupportedModelError: the engine would not compute what transformers does; the message names what to use.
        ValueError: a limit is out of range.

    Attributes:
        model: the model that is served.
        limits: limits that requests are checked against.
        eos_token_ids: tokens that end an answer.
        shortage: one line on the lack of memory that ended the engine's thread; empty if nothing or another error did.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_running_requests: int = 64,
        max_model_len: int | None = None,
        max_total_tokens: int | None = None,
        weight_version: str = "default",
        model_path: str = "",
        detokenize: Decode | None = None,
        record_routing: bool = False,
        pictures: Pictures | None = None,
        chunked_prefill_size: int = CHUNKED_PREFILL_SIZE,
        saves_memory: bool = False,
    ) -> None:
        if saves_memory:
            own_storage(model)
        longest = longest_sequence(model, max_model_len)
        sizes = {"max_running_requests": max_running_requests, "chunked_prefill_size": chunked_prefill_size}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        full = max_running_requests * longest
        capacity = full if max_total_tokens is None else max_total_tokens
        running = min(capacity, full)
        self.model, self._pictures = model, pictures
        weights = ServedWeights(model, model_path)
        if model.device.type != "cpu":
            from asyncrl.models.fused_norms import fuse_norms  # torch has the kernel on GPUs

            fuse_norms(model, gradients=False)
        runner = ModelRunner(model, running, record_routing=record_routing, pictures=pictures)
        forward = PrefixForward(runner)
        check_parity(forward, longest)
        if pictures is not None:
            pictures.tower.encoded = 0  # not counting the pictures of the check
        self.limits = EngineLimits(
            runner.vocab_size,
            max_running_requests,
            longest,
            running,
            reads_text=detokenize is not None,
            records_routing=record_routing,
        )
        self.eos_token_ids = eos_token_ids(model)
        self._jobs = JobTable()
        queue = AdmissionQueue(max_running_requests, running)
        self._batch = DecodeBatch(
            forward, queue, self._jobs.note, detokenize, capacity=capacity, part=chunked_prefill_size
        )
        self._batch.relabel(weight_version)
        self._memory: EngineMemory | None = None
        if saves_memory:
            from asyncrl.inference.embedded.memory import EngineMemory

            self._memory = EngineMemory(runner, weights)
        self._updates = WeightUpdates(self._batch, weights)
        self._mailbox = Mailbox()
        threads = torch.get_num_threads()  # a new thread would have its own thread count
        self._thread = threading.Thread(target=self._run, args=(threads,), name="engine", daemon=True)
        self.shortage = ""
        self._paused: PauseMode | None = None
        self._statistics = Statistics(self._batch, self._jobs, self.limits, pictures)

    def start(self) -> None:
        """Run the engine on its own thread until `close`."""
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop the thread, and fail unfinished jobs.

        Raises:
            TimeoutError: a step takes longer than `timeout_s`.
        """
        self._mailbox.close()
        if self._thread.ident is None:  # the thread was never started
            self._fail_all(EngineStoppedError("the engine was closed"))
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine's thread did not end within {timeout_s} s")

    @property
    def healthy(self) -> bool:
        """True while the engine can serve."""
        return not self._mailbox.closed

    @property
    def paused(self) -> bool:
        """True between `pause` and `resume`."""
        return self._paused is not None

    @property
    def model_path(self) -> str:
        """Folder of the weights in force."""
        return self._updates.weights.path

    @property
    def weight_version(self) -> str:
        """Label of the weights in force."""
        return self._batch.version

    @property
    def takes_pictures(self) -> bool:
        """True if requests may show pictures."""
        return self._pictures is not None

    def stats(self) -> EngineStats:
        """Return the latest snapshot, at most `INTERVAL_S` old while the engine works."""
        return self._statistics.latest

    def prepare(self, job: Job) -> None:
        """Prepare the pictures of `job`, some milliseconds for each new one. Without this call `submit` does it.

        Raises:
            RequestError: a picture is damaged, or its placeholders are not those of the model.
        """
        if self._pictures is not None and not job.shown:
            from asyncrl.inference.embedded.pictures import shown_prompts

            job.shown = shown_prompts(self._pictures, job)

    def submit(self, job: Job) -> Future[list[GenerationOutput]]:
        """Queue the samples of a job. The future has their outputs, in order.

        Raises:
            RequestError: a prompt is empty, too long or outside the vocabulary, or a rid is in use.
            EngineStoppedError: the engine has ended.
        """
        for request in job.inputs:
            self.limits.check(request)
        if self._pictures is not None:
            self.prepare(job)
        self._jobs.reserve(job)
        try:
            self._mailbox.post(lambda: self._batch.queue.waiting.extend(self._jobs.open(job)), starts=job.future)
        except EngineStoppedError:
            self._jobs.release(job)
            raise
        return job.future

    def abort(self, rid: str = "", abort_all: bool = False) -> Future[int]:
        """End samples whose rid starts with `rid`, or all. The future has their number."""
        return self._mailbox.post(lambda: self._batch.abort(lambda s: abort_all or s.request.rid.startswith(rid)))

    def abort_job(self, job: Job) -> Future[int]:
        """End the samples of one job, for example because its client has gone. The future has their number."""
        return self._mailbox.post(lambda: self._batch.abort(lambda sequence: sequence.job is job))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop generating. The future is done once no further token will be produced."""
        return self._mailbox.post(lambda: self._set_paused(mode))

    def resume(self) -> Future[None]:
        """Generate again."""
        return self._mailbox.post(lambda: self._set_paused(None))

    def release_memory(self, tags: Collection[MemoryTag]) -> Future[int]:
        """Release the memory of these kinds while the engine is paused and runs nothing. The future has its bytes.

        Raises:
            MemoryStateError: (from the future) it is not paused, samples are frozen, or it does not save memory.
        """
        return self._mailbox.post(lambda: self._release_memory(tags))

    def resume_memory(self, tags: Collection[MemoryTag]) -> Future[None]:
        """Allocate the memory of these kinds again. Released weights have no values before they are updated."""
        return self._mailbox.post(lambda: self._resume_memory(tags))

    def _resume_memory(self, tags: Collection[MemoryTag]) -> None:
        if self._memory is not None:
            self._memory.resume(tags)

    def _release_memory(self, tags: Collection[MemoryTag]) -> int:
        if self._memory is None:
            raise MemoryStateError("this server keeps its memory; colocate it (generation.colocated)")
        if self._paused is None or self._batch.samples.live or self._batch.long_prompts.held:
            raise MemoryStateError("memory is released while the server is paused and runs nothing: pause it (abort)")
        if MemoryTag.kv_cache in tags:
            self._batch.prefills.forget()
        freed = self._memory.release(tags)
        logger.info("released %.1f MiB (%s)", freed / 2**20, ", ".join(sorted(tags)))
        return freed

    def update_weights(
        self, path: str, version: str | None = None, *, flush_cache: bool = True, abort_all: bool = False
    ) -> Future[int]:
        """Load the checkpoint in `path`, or the adapters merged with the base, between two steps.

        The caller's thread reads and checks the files.

        Returns:
            Future with the number of samples that were frozen.

        Raises:
            WeightUpdateError: (from here or from the future) the files are refused; the old weights keep serving.
        """
        if self._memory is not None and MemoryTag.weights in self._memory.released:
            raise WeightUpdateError("the weights' memory is released; resume it first. The weights were not changed.")
        change = self._updates.read(path, version, flush_cache=flush_cache)

        def request() -> None:
            self._updates.queue(change, self._jobs.arrivals)
            if abort_all:
                self._batch.abort(lambda _: True)

        self._mailbox.post(request, starts=change.future)
        return change.future

    def step(self) -> bool:
        """Run commands and one step on the caller's thread, for use without `start`.

        Returns:
            False if nothing could run.
        """
        while (command := self._mailbox.take()) is not None:
            command.run()
            self._deliver()
            self._statistics.due = True
        self._updates.apply(self._runnable)
        if not self._runnable():
            self._take_statistics()
            return False
        begin = time.perf_counter()
        self._batch.step()
        self._deliver()
        self._statistics.worked(begin, time.perf_counter())
        return True

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)
        failure: BaseException = EngineStoppedError("the engine was closed")
        try:
            while True:
                if not (self._updates.waiting or self._runnable()):
                    self._take_statistics()
                    self._mailbox.wait()
                if self._mailbox.closed:
                    break
                self.step()
        except Exception as error:
            logger.exception("the embedded engine failed")
            if is_out_of_memory(error):  # kept as text: the error holds the engine
                self.shortage = shortage("the embedded engine", "a step", self.model.device, error)
            failure = EngineStoppedError(f"the engine failed: {error!r}")
        finally:
            self._fail_all(failure)

    def _runnable(self) -> bool:
        return self._paused is None and self._batch.runnable

    def _set_paused(self, mode: PauseMode | None) -> None:
        """Stop in this mode; None continues, which needs all memory."""
        if mode is None and self._memory is not None:
            self._memory.check_complete()
        if mode == PauseMode.abort:
            self._batch.abort(lambda _: True)
        elif mode == PauseMode.retract:
            self._statistics.retractions += self._batch.retract()
        self._paused = mode

    def _deliver(self) -> None:
        """Answer complete jobs, after the statistics count them."""
        if self._jobs.due:
            self._take_statistics()
            self._jobs.answer()

    def _fail_all(self, error: BaseException) -> None:
        """Fail all jobs, changes and commands, so that no caller waits for ever."""
        self._mailbox.close()
        self._jobs.fail(error)
        self._updates.fail(error)
        while (command := self._mailbox.take()) is not None:
            command.fail(error)

    def _take_statistics(self) -> None:
        self._statistics.take(paused=self.paused)
