"""A base model with one LoRA adapter: get and set its adapter weights, compute its logprobs.

Everything here computes and blocks; the service calls it in a thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import msgspec
import numpy as np
import torch
from peft.utils import get_peft_model_state_dict

from pipeline.config import ConfigError, TrainerConfig
from trainer.batches.packing import Layout, MicroBatch
from trainer.distillation.teacher import TeacherLogprobs
from trainer.engine.fitting import detect_out_of_memory
from trainer.engine.forward import Forward
from trainer.engine.images import image_inputs_of
from trainer.engine.loading import base_digest, device_for, enable_checkpointing, load
from trainer.engine.parallel import ProcessGroup
from trainer.engine.state import Logprobs, Weights
from trainer.sequences import TokenSequence

_MAX_LOGITS, _MAX_LOGITS_ON_GPU = 12_000_000, 32_000_000
"""Maximum number of logits (positions times vocabulary) in memory at once. More are computed in chunks of positions,
and again in the backward pass. On a CPU fewer, because memory is smaller; not below 8.4 million, because the C library
keeps buffers of less than 32 MiB in its heap, where they fragment: a process took 1 to 3 GB, and 0.7 GB with these."""


def load_settings(config: TrainerConfig) -> dict[str, object]:
    """The settings that a model is loaded with: policies share an engine where all of them are equal."""
    memory = config.memory
    return {
        "engine": config.engine,
        "dtype": config.dtype,
        "memory.quantization": memory.quantization,
        "unsloth.max_seq_length": config.unsloth.max_seq_length,
        **{f"lora.{name}": value for name, value in msgspec.structs.asdict(config.lora).items()},
        "seed": config.seed,
        "threads": config.threads,
        "memory.gradient_checkpointing": memory.gradient_checkpointing,
        "memory.sharded": memory.sharded,
    }


class PolicyModel:
    """The model of `base`, a folder or hub name, under the settings `config`. With `trainer.memory.sharded`, its
    weights are divided among the processes of `process_group`.

    Raises `ConfigError` where the settings do not work on this machine or with this model."""

    def __init__(self, base: str, config: TrainerConfig, process_group: ProcessGroup | None = None) -> None:
        self.base, self.config = base, config
        self.device = device_for(config)
        self.set_threads()
        if self.device.type == "cuda" and config.memory.gpu_share:
            torch.cuda.set_per_process_memory_fraction(config.memory.gpu_share)
        # cuDNN makes a plan for each new shape of a pass, in tens of milliseconds, and passes have all lengths.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.sharded = config.memory.sharded and process_group is not None
        # A machine's memory need not hold one whole model for each of its processes.
        with process_group.in_turn() if process_group and self.sharded else nullcontext():
            loaded = load(base, config, self.device)
            self.peft, self.lora, self.checkpointing = loaded.model, loaded.lora, loaded.checkpointing
            self.accepts_masks, self.longest = loaded.accepts_masks, loaded.longest
            inner = self.peft.get_base_model()
            self.base_digest = base_digest(base, inner)
            embeddings = inner.get_input_embeddings().weight
            self.vocabulary = int(embeddings.shape[0])
            # The input embeddings need no multiplications.
            # Four-bit weights are packed: their state has the shape.
            shapes = [getattr(p, "quant_state", p).shape for p in self.peft.parameters()]
            self.multiplied_parameters = sum(map(math.prod, shapes)) - embeddings.numel()
            # Unsloth loads the text model alone, and images stand in whole rows.
            self.images = image_inputs_of(base, inner.config) if config.engine == "transformers" else None
            self.forward = Forward(inner, self.images)
            if process_group is not None and self.sharded:
                self.forward.shard(self.device, process_group)
            elif config.engine == "transformers":
                self.peft.to(self.device)
        self._live: Weights = get_peft_model_state_dict(self.peft, save_embedding_layers=False)
        """Views of the adapter's parameters under the names of its files; a step changes them in place."""
        self.parameters = [p for p in self.peft.parameters() if p.requires_grad]
        """Those of the adapter, which the optimizer updates."""
        self.dtype: torch.dtype = self.forward.trunk.dtype
        self.adapter_dtype = _adapter_dtype(config, self.dtype)
        """Type of the adapter's published weights. `None` publishes them in the training type."""

    def configure(self, config: TrainerConfig) -> None:
        """Apply other settings. Raises `ConfigError` if they change what the model was loaded with."""
        if (wanted := load_settings(config)) != (present := load_settings(self.config)):
            names = ", ".join(name for name in present if wanted[name] != present[name])
            raise ConfigError(f"trainer: {names} can't be changed once the model is loaded")
        self.config = config
        self.peft.train()

    def set_threads(self) -> None:
        """Apply `trainer.threads` to the calling thread: PyTorch keeps it per thread, and the service's worker
        threads come and go."""
        torch.set_num_threads(self.config.threads)

    def save_memory(self) -> bool:
        """Switch gradient checkpointing on, if it is off and `trainer.memory.gradient_checkpointing` leaves that to the
        trainer. Returns whether this call switched it on."""
        memory = self.config.memory
        if self.checkpointing or memory.gradient_checkpointing != "auto" or self.config.engine == "unsloth":
            return False
        self.checkpointing = enable_checkpointing(self.peft.get_base_model(), required=False)
        return self.checkpointing

    def move_base(self, device: torch.device) -> None:
        """Move the frozen weights to `device`: to the CPU while the inference server has the GPU, and back
        (`trainer.gpu_turns`). The adapter stays where it is, because `_live` holds views of its tensors."""
        frozen = [p for p in self.peft.parameters() if not p.requires_grad]
        for tensor in [*frozen, *self.peft.buffers()]:
            tensor.data = tensor.data.to(device)
            if (state := getattr(tensor, "quant_state", None)) is not None:
                state.to(device)  # it takes an eighth of the memory of the four-bit weights
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- the adapter ---------------------------------------------------------------------------------------------

    def weights(self) -> Weights:
        """Return a copy of the live adapter, on the CPU."""
        live = list(self._live.values())
        # One copy from the device, not one for each of hundreds of small tensors.
        flat = torch.cat([tensor.detach().flatten() for tensor in live]).cpu()
        parts = flat.split([tensor.numel() for tensor in live])
        return {
            name: part.view(tensor.shape).to(tensor.dtype, copy=True)
            for (name, tensor), part in zip(self._live.items(), parts, strict=True)
        }

    def as_published(self, weights: Weights) -> Weights:
        """Return `weights` rounded to the type in which adapters are published; the same object if it is the training
        type."""
        if self.adapter_dtype is None:
            return weights
        return {name: tensor.to(self.adapter_dtype) for name, tensor in weights.items()}

    def load_adapter(self, weights: Weights) -> None:
        """Make `weights` the live adapter. Raises `ValueError` where names or shapes differ from the model's."""
        live_shapes, shapes = ({(name, tensor.shape) for name, tensor in w.items()} for w in (self._live, weights))
        if misfits := sorted({name for name, _ in live_shapes ^ shapes}):
            raise ValueError(
                f"the adapter does not fit the model: {len(misfits)} tensors are not in both or differ in shape, such "
                f"as {misfits[0]}: take back a change of trainer.lora.rank or the base"
            )
        live = list(self._live.values())
        flat = torch.cat([weights[name].flatten() for name in self._live]).to(self.device)
        parts = flat.split([tensor.numel() for tensor in live])
        with torch.no_grad():
            torch._foreach_copy_(live, [part.view(tensor.shape) for part, tensor in zip(parts, live, strict=True)])

    @contextmanager
    def with_adapter(self, weights: Weights) -> Iterator[None]:
        """Make `weights` the live adapter within the context; the one before is restored after it."""
        before = self.weights()
        self.load_adapter(weights)
        try:
            yield
        finally:
            self.load_adapter(before)

    # -- forward -------------------------------------------------------------------------------------------------

    @property
    def positions_at_once(self) -> int:
        """Number of positions whose logits may be in memory at once; at least 1."""
        limit = _MAX_LOGITS if self.device.type == "cpu" else _MAX_LOGITS_ON_GPU
        return max(1, limit // self.vocabulary)

    def logprobs(
        self,
        layout: Layout,
        shape: tuple[int, int],
        *,
        entropy: bool = True,
        teacher_logprobs: Sequence[TeacherLogprobs | None] = (),
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the logprobs of a layout's trained tokens at the sampling temperature, the entropies of their
        distributions, and the divergences from a teacher's: [S, K] each, in nats, zero where a sequence has fewer.

        Without `entropy` the entropies are zero. `teacher_logprobs`: the teacher's, of each sequence of the layout; the
        divergence is zero where it was not asked. Empty: there is no teacher."""
        layout = layout.to(self.device)
        hidden_RLD = self.forward.hidden(layout)
        tops = self._teacher_tops(layout, teacher_logprobs)
        # A prediction that several replies share is computed once, but not with a teacher: its logprobs may differ.
        distinct_U = layout.distinct_U if tops is None else None
        at = slice(None) if distinct_U is None else distinct_U
        computed = self.forward.logprobs(
            hidden_RLD[layout.rows_N[at], layout.cols_N[at]],
            layout.targets_N[at],
            layout.temperatures_N[at],
            None if layout.cuts_N3 is None else layout.cuts_N3[at],
            self.positions_at_once,
            # Where the entropy is only measured no gradient is kept for it.
            "trained" if entropy and self.config.loss.entropy_coef else "measured" if entropy else "none",
            tops,
        )
        if distinct_U is not None:
            computed = tuple(values_U[layout.same_N] for values_U in computed)
        logprobs_SK, entropies_SK, divergences_SK = (_by_sequence(values_N, layout, shape) for values_N in computed)
        return logprobs_SK, entropies_SK, divergences_SK

    def _teacher_tops(
        self, layout: Layout, teacher_logprobs: Sequence[TeacherLogprobs | None]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return ids and logprobs, [N, K], of the teacher's most probable tokens at the trained tokens of a layout.
        `teacher_logprobs[s]` are those of sequence s. `None` if no teacher was asked, or only about sampled tokens."""
        any_tops_kK = next((t.top_logprobs_kK for t in teacher_logprobs if t is not None), None)
        if any_tops_kK is None or not any_tops_kK.shape[1]:
            return None
        # The layout holds the trained tokens of one sequence after the other.
        counts = torch.bincount(layout.sequence_N, minlength=len(teacher_logprobs)).tolist()
        slots = [slots_k.numpy() for slots_k in layout.slot_N.cpu().split(counts)]
        filled = [
            TeacherLogprobs.blank(at.max(initial=-1) + 1, any_tops_kK.shape[1], any_tops_kK.dtype)
            if of_sequence is None
            else of_sequence
            for of_sequence, at in zip(teacher_logprobs, slots, strict=True)
        ]
        pairs = list(zip(filled, slots, strict=True))
        ids_NK = torch.from_numpy(np.concatenate([t.top_ids_kK[at] for t, at in pairs]))
        logprobs_NK = torch.from_numpy(np.concatenate([t.top_logprobs_kK[at] for t, at in pairs]))
        return ids_NK.to(self.device), logprobs_NK.to(self.device)

    def teacher_logprobs_of(
        self, batches: Sequence[MicroBatch], sequences: Sequence[TokenSequence], top_k: int
    ) -> dict[int, TeacherLogprobs]:
        """Return the logprobs that the live model, as a teacher, gives the sequences in `batches` and its `top_k` most
        probable tokens, by the indices in `sequences`. Raises `PassTooLargeError` where memory runs out."""
        count = min(top_k, self.vocabulary)

        def compute(layout: Layout, shape: tuple[int, int]) -> Iterator[torch.Tensor]:
            """Return the fields of `TeacherLogprobs` for one pass, each with a row for each of its sequences."""
            layout = layout.to(self.device)
            hidden_RLD = self.forward.hidden(layout)
            hidden_ND = hidden_RLD[layout.rows_N, layout.cols_N]
            chunk = self.positions_at_once
            logprobs_N = self.forward.logprobs(
                hidden_ND, layout.targets_N, layout.temperatures_N, layout.cuts_N3, chunk, "none"
            )[0]
            fields = (logprobs_N, *self.forward.top_logprobs(hidden_ND, layout.temperatures_N, count, chunk))
            return (_by_sequence(values_N, layout, shape) for values_N in fields)

        return {i: TeacherLogprobs(*fields) for i, fields in self._compute_each(batches, sequences, compute)}

    def logprobs_of(self, batches: Sequence[MicroBatch], sequences: Sequence[TokenSequence]) -> dict[int, Logprobs]:
        """Return the logprobs of the sequences in `batches`, by their indices in `sequences`; without gradients.

        Raises `PassTooLargeError` where memory runs out."""
        of_each = self._compute_each(
            batches, sequences, lambda layout, shape: self.logprobs(layout, shape, entropy=False)[:1]
        )
        return {i: logprobs for i, (logprobs,) in of_each}

    def _compute_each(
        self,
        batches: Sequence[MicroBatch],
        sequences: Sequence[TokenSequence],
        compute: Callable[[Layout, tuple[int, int]], Iterable[torch.Tensor]],
    ) -> Iterator[tuple[int, list[Any]]]:
        """Make the passes of `batches` without gradients. `compute` returns tensors of the shape [S, K, …] that it is
        given. Yields each sequence's index, with its rows of these tensors, cut to its trained tokens."""
        for batch in batches:
            shape = shape_of([sequences[i] for i in batch.indices])
            with torch.no_grad(), detect_out_of_memory(batch), self.forward.one_pass():
                computed = [part.cpu().numpy() for part in compute(batch.layout, shape)]
            for row, i in enumerate(() if batch.is_filler else batch.indices):
                yield i, [part[row, : sequences[i].trained_tokens] for part in computed]


def shape_of(sequences: Sequence[TokenSequence]) -> tuple[int, int]:
    """Return the number of sequences and the most trained tokens in one of them: the shape [S, K] of their logprobs."""
    return len(sequences), max(s.trained_tokens for s in sequences)


def _adapter_dtype(config: TrainerConfig, base: torch.dtype) -> torch.dtype | None:
    """Return the type of published adapters (`trainer.lora.dtype`), for a base model of the type `base`; `None` for the
    type in which they are trained."""
    if config.lora.dtype == "bfloat16" or (config.lora.dtype == "auto" and base == torch.bfloat16):
        return torch.bfloat16
    return None


def _by_sequence(values_N: torch.Tensor, layout: Layout, shape: tuple[int, int]) -> torch.Tensor:
    """Return values of the layout's trained tokens, [N, …], in the shape [S, K, …]: zero where a sequence has fewer."""
    placed = values_N.new_zeros((*shape, *values_N.shape[1:]))
    return placed.index_put((layout.sequence_N, layout.slot_N), values_N)
