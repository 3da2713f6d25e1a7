"""Where SGLang calls the plugin: three hooks, no server flag.

1. Before the attention backends are made, the model is told which layers to collect; CUDA graphs come later and so
   include it. `layers_to_capture` of a model are hidden_states indices (the state *before* layer i), for every class,
   whatever its `set_eagle3_layers_to_capture` makes of given ids: those differ between Llama and DeepSeek, so the list
   is set itself.
2. Around ModelRunner.forward: which requests are in this pass, and, behind it, whether the next hook was reached.
3. Around LogitsProcessor.forward: the last state of every prefilled token and the collected ones, in every chunk.

Seen to work with SGLang 0.5.17 and 0.5.23; with any other version `eyas doctor` and the tiny twin decide.
"""

import json
import os
from collections.abc import Callable
from typing import Any

import torch

from eyas.engines.sglang.plugin.protocol import Orders, status_file
from eyas.engines.sglang.plugin.staging import Staging
from eyas.engines.sglang.plugin.stitch import Chunk, chunks

RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor"
FLAG = "_is_layer_to_capture"
_registered = False


def register() -> None:
    """Register the hooks with SGLang, once. Raises OSError, ValueError, KeyError: orders that cannot be read."""
    global _registered
    if _registered:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _registered = True
    plugin = Plugin(Orders.read())
    HookRegistry.register(f"{RUNNER}.init_attention_backends", plugin.before_backends, HookType.BEFORE)
    HookRegistry.register(f"{RUNNER}.forward", plugin.around_forward, HookType.AROUND)
    HookRegistry.register(f"{LOGITS}.forward", plugin.around_logits, HookType.AROUND)


class Plugin:
    """The plugin in one scheduler process."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.rank = 0
        self.staging: Staging | None = None
        self.batch: Any = None
        """The pass that is under way, if it prefills captured requests."""
        self.chunks: list[Chunk] = []
        self.collected = False

    def before_backends(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        """Tell the target which layers to collect, and the world that the plugin is there.

        Never raises: a server that cannot capture still serves, and the status says what is in the way.
        """
        if runner.is_draft_worker:
            return
        said: dict[str, Any] = {"pid": os.getpid(), "root": str(self.orders.root), "torch": torch.__version__}
        try:
            said |= self._prepare(runner)
        except Exception as error:
            said["problem"] = f"this SGLang is unlike those that the plugin knows ({type(error).__name__}: {error})"
        path = status_file(self.orders.status, self.rank)
        temporary = path.with_name(f".{path.name}.partial")
        try:
            temporary.write_text(json.dumps(said, indent=1), encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            self.staging = None
            print(f"eyas: nothing is captured: cannot write {path}: {error.strerror}", flush=True)

    def _prepare(self, runner: Any) -> "dict[str, Any]":
        """Make ready for captures; returns what the status says."""
        import sglang
        from sglang.srt.distributed import parallel_state

        self.rank = parallel_state.get_tensor_model_parallel_rank()
        text, device = runner.model_config.hf_text_config, torch.device(runner.device)
        layers = self.orders.layers or (2, text.num_hidden_layers // 2, text.num_hidden_layers - 3)
        problem = obstacle(runner) or collect(runner.model, layers)
        if not problem:
            self.staging = Staging(self.orders, layers, text.hidden_size, runner.dtype, device, self.rank)
        return {
            "rank": self.rank,
            "tp": parallel_state.get_tensor_model_parallel_world_size(),
            "sglang": sglang.__version__,
            "model": type(runner.model).__name__,
            "layers": list(layers),
            "num_layers": text.num_hidden_layers,
            "hidden_size": text.hidden_size,
            "vocab_size": text.vocab_size,
            "dtype": str(runner.dtype).removeprefix("torch."),
            "device": str(runner.device),
            "problem": problem or None,
        }

    def around_forward(self, forward: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Remember a pass that prefills captured requests."""
        if self.staging is None or runner.is_draft_worker:
            return forward(runner, batch, *args, **kwargs)
        self.chunks, self.batch, self.collected = self._chunks(batch), batch, False
        if not self.chunks:
            return forward(runner, batch, *args, **kwargs)
        try:
            result = forward(runner, batch, *args, **kwargs)
            if not self.collected:
                for chunk in self.chunks:
                    self.staging.fail(
                        chunk.wanted,
                        "the pass went by without its hook, as in a CUDA graph that holds the whole model: start the "
                        "server without that graph",
                    )
            return result
        finally:
            self.chunks, self.batch = [], None

    def around_logits(
        self,
        forward: Callable[..., Any],
        processor: Any,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        lm_head: Any,
        metadata: Any,
        aux_hidden_states: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Take the states of the pass that is under way."""
        if self.chunks and self.staging is not None and not self.collected:
            self.collected = True
            self._take(self.staging, input_ids, hidden_states, aux_hidden_states)
        return forward(processor, input_ids, hidden_states, lm_head, metadata, aux_hidden_states, *args, **kwargs)

    def _chunks(self, batch: Any) -> "list[Chunk]":
        if not batch.forward_mode.is_extend() or not batch.rids or batch.extend_seq_lens_cpu is None:
            return []
        prefixes = batch.extend_prefix_lens_cpu or [0] * len(batch.rids)
        found = chunks(batch.rids, [int(p) for p in prefixes], [int(n) for n in batch.extend_seq_lens_cpu])
        return [chunk for chunk in found if self.rank == 0 or chunk.wanted.every_rank]

    def _take(self, staging: Staging, ids: "torch.Tensor | None", last: torch.Tensor, aux: Any) -> None:
        rows = sum(int(n) for n in self.batch.extend_seq_lens_cpu)
        ids = self.batch.input_ids if ids is None or len(ids) < rows else ids
        parts = [aux] if isinstance(aux, torch.Tensor) else list(aux or [])
        problem = ""
        if sum(part.shape[-1] for part in parts) != 3 * last.shape[-1]:
            problem = f"the model gave {len(parts)} collected states, not three: its class does not collect them all"
        elif min(len(ids), len(last), *map(len, parts)) < rows:
            problem = f"the pass has {rows} tokens and fewer rows of states [sglang 8066]"
        elif staging.unlike(last) or any(part.dtype != last.dtype for part in parts):
            problem = f"the pass gave states of width {last.shape[-1]} in {last.dtype}, unlike what the model declares"
        for chunk in self.chunks:
            try:
                if not problem:
                    staging.put(chunk, ids, aux if isinstance(aux, torch.Tensor) else parts, last)
            except Exception as error:  # Whatever it is, the server's own work goes on.
                problem = f"{type(error).__name__}: {error}"
            if problem:
                staging.fail(chunk.wanted, problem)


def obstacle(runner: Any) -> str:
    """Why this server cannot capture; empty if it can."""
    args = runner.server_args
    if args.speculative_algorithm:
        return "speculation is on, which cuts captures short [sglang 26163]: start the server without a draft"
    if args.pp_size > 1:
        return "pipeline parallelism: no rank has all of the layers; start the server with --pp-size 1"
    if getattr(args, "dp_size", 1) > 1 and not getattr(args, "enable_dp_attention", False):
        return "several replicas behind one address: start each as a server of its own, without --dp-size"
    if getattr(args, "enable_dp_attention", False):
        return "data-parallel attention spreads a pass over ranks; start the server without --enable-dp-attention"
    return ""


def collect(model: Any, layers: "tuple[int, ...]") -> str:
    """Make a model collect the states at these hidden_states indices; why it cannot, empty if it can."""
    name = type(model).__name__
    if not hasattr(model, "set_eagle3_layers_to_capture"):
        return f"{name} of this SGLang does not collect hidden states (it has no set_eagle3_layers_to_capture)"
    model.set_eagle3_layers_to_capture(None)
    holders = [module for module in model.modules() if getattr(module, "layers_to_capture", None)]
    if len(holders) != 1:
        return f"{name} of this SGLang keeps its layers_to_capture in {len(holders)} places, not one"
    holders[0].layers_to_capture = list(layers)
    # Some classes (Qwen MoE among them) look at a flag of each layer instead.
    if any(hasattr(layer, FLAG) for layer in getattr(holders[0], "layers", ())):
        for number, layer in enumerate(holders[0].layers):
            setattr(layer, FLAG, number in layers)
    return ""
