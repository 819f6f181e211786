"""What frameworks do otherwise than our programs, as the words of a record or their public code say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from decoder import Shape

from costmodels.errors import BadInput

# FlashAttention "reaching only 25-40% of the theoretical maximum FLOPs/s", its successor 50 to 73 % (arXiv 2307.08691)
FLASH_ATTENTION_1 = 0.55


@dataclass(frozen=True)
class Stack:
    """What the software of a run does otherwise than ours, as its record or its public code says."""

    attention: float = 1.0  # times the speed of the attention kernels in the catalogue
    fused_gate: bool = False  # keeps what goes into a gated activation and what comes out, nothing between
    loss: str = "plain"  # as in Shape
    composite_norm: bool = False  # as in Shape
    metrics: int = 0  # cross-entropies that are computed beside the loss, after the backward, in fp32
    stages: str = "even"  # how layers are dealt out to the stages of a pipeline, one of SPLITS
    copies_heads: bool = False  # keys and values out of what is kept with queries; of several rows what attention gives
    regathers: bool = False  # what is gathered along the sequence is gathered again for the backward, not kept
    vocabulary_multiple: int = 1  # of the ranks of tp: the vocabulary is filled up to it
    overlaps: bool = True  # gradients are reduced while others are computed
    gradient_bytes: int = 4  # these as in Problem
    beside_bytes: int = 0
    reduced_bytes: int = 4
    sends_parts: bool = False
    copies: bool = False
    accumulates: bool = True


# arguments.py: make_vocab_size_divisible_by = 128 times the ranks of tp, bias_swiglu_fusion;
# core/tensor_parallel/layers.py gathers the input of a product with sequence parallelism in both passes;
# core/tensor_parallel/cross_entropy.py: all of the loss in place, on logits in fp32; arguments.py:
# gradient_accumulation_fusion, products add to the gradients by themselves
MEGATRON = Stack(fused_gate=True, regathers=True, vocabulary_multiple=128, loss="in_place", accumulates=False)
# Megatron's layers in DeepSpeed's engine, which leaves adding gradients to autograd
MEGATRON_DEEPSPEED = replace(MEGATRON, fused_gate=False, overlaps=False, sends_parts=True, accumulates=True)
# What public code says of a framework; the first whose name is in a record's.
STACKS: Mapping[str, Stack] = {
    # scripts/train/benchmarking/submit_benchmarks.py: attn_impl = "triton", the kernel of FlashAttention 1;
    # models/mpt/modeling_mpt.py: loss_fn = "fused_crossentropy"; train_metrics, a cross-entropy and a perplexity,
    # which Composer's trainer updates after the backward of every microbatch (_eval_train_metrics)
    "llm-foundry": Stack(attention=FLASH_ATTENTION_1, loss="fused", metrics=2),
    # solver/optimizer/hybrid_zero_optim.py reduces gradients as they are; model/losses/ce_loss.py: inplace_backward, on
    # logits that core/naive_amp.py casts to fp32; core/parallel/shard.py: the last stages have the layers that are left
    "InternEvo": Stack(loss="in_place", stages="last_more", gradient_bytes=2, reduced_bytes=2),
    # as Megatron-LM, but for the gate (model/transformer.py); DeepSpeed's runtime/pipe/engine.py reduces after all
    # microbatches and sends partitioned tensors; partition_balanced in runtime/utils.py fills one stage after the other
    "Megatron-DeepSpeed": replace(MEGATRON_DEEPSPEED, stages="filled"),
    "GPT-NeoX": MEGATRON_DEEPSPEED,  # its engine, and mpu's loss
    # training.py, arguments.py: reduces after all microbatches unless asked (overlap_grad_reduce), and sends parts
    # (scatter_gather_tensors_in_pipeline)
    "Megatron-LM": replace(MEGATRON, overlaps=False, sends_parts=True),
    # Megatron-Core and what is built on it, whose recipes ask for overlap
    "Megatron": MEGATRON,
    "NeMo": MEGATRON,
    # TinyLlama's fused_cross_entropy.py: inplace_backward, on logits that Fabric casts to fp32; Fabric's
    # plugins/precision/fsdp.py: bf16-mixed reduces in bf16
    "lit-gpt": Stack(loss="in_place", reduced_bytes=2),
    # runtime/engine.py: gradients are accumulated and reduced in the dtype of the model
    "DeepSpeed": Stack(gradient_bytes=2, reduced_bytes=2),
    "torchtitan": Stack(copies=True),  # the fully_shard that our programs have too
    # models/base.py, build_model: blocks by their cost; parallel/tensor_parallel/functional.py: a loss in place;
    # models/llama.py: queries are a view of all three, keys and values are concatenated anew; what attention gives is
    # transposed before the next product, which copies it unless a microbatch has one row; trainer.py: with ZeRO and
    # gradients in fp32 these are reduced after all microbatches; optim/gradient_accumulator.py: those in bf16 stay
    # beside them to the end of the backward pass
    "nanotron": Stack(loss="in_place", stages="by_cost", copies_heads=True, overlaps=False, beside_bytes=2),
    # policies/mixed_precision.py: bfSixteen reduces in bf16
    "fms-fsdp": Stack(reduced_bytes=2),
}


def stack_of(record: Mapping[str, Any]) -> Stack:
    """From the framework, the precision and the words of a record.

    Gradients of fp16 are fp16 until the optimizer (apex O2, Megatron-LM, DeepSpeed), and so are those of bf16 where
    the framework reduces what the parameters give it.
    """
    framework = str(record["framework"] or "")
    said = f"{record['optimizer'] or ''}; {record['notes'] or ''}".lower()
    stack = next((stack for name, stack in STACKS.items() if name in framework), Stack())
    if "fused cross-entropy" in said:
        stack = replace(stack, loss="fused")
    if framework.startswith("DeepSpeed") and record["zero_stage"] in (1, 2):
        stack = replace(stack, overlaps=False)  # runtime/zero/config.py: overlap_comm is for stage 3, unless asked for
    if "(HF model)" in framework:  # transformers, models/llama/modeling_llama.py, until 4.45
        stack = replace(stack, loss="shifted", composite_norm=True)
    if "embeddings counted as layers" in said:
        stack = replace(stack, stages="even")
    if record.get("torch_compile"):
        stack = replace(stack, fused_gate=True)
    if record["precision"] == "fp16":
        stack = replace(stack, gradient_bytes=2, reduced_bytes=2)
    if "bf16 gradient reduction" in said or "gradients accumulated in bf16" in said:
        stack = replace(stack, gradient_bytes=2, reduced_bytes=2)
    if "accumulating gradients in fp32" in said:  # beside those of bf16
        stack = replace(stack, gradient_bytes=6)
    if "params and reduction in bf16" in said:
        stack = replace(stack, reduced_bytes=2)
    return stack


# -- how layers are dealt out to stages --------------------------------------------------------------------------------


def even(shape: Shape, count: int) -> list[int]:
    """How many layers are before the end of each of so many stages but the last.

    Where these do not divide, the first and the last stages have fewer.
    """
    least, more = divmod(shape.layers, count)
    fewer = sorted(range(count), key=lambda k: -min(k + 1, count - k))
    return list(accumulate(least + (k in fewer[:more]) for k in range(count - 1)))


def by_cost(shape: Shape, count: int) -> list[int]:
    """The same if a stage ends as soon as all up to there costs more than its share. The head counts as one layer more.

    What costs are the weights of layers and of the head; the embedding, norms and the loss cost nothing.
    """
    layer = (4 * shape.heads * shape.head_dim + 3 * shape.ffn) * shape.hidden
    costs = [
        *(layer * (number + 1) for number in range(shape.layers)),
        layer * shape.layers + shape.vocab * shape.hidden,
    ]
    ends: list[int] = []
    for number, cost in enumerate(costs, 1):
        if len(ends) < count - 1 and cost * count > (len(ends) + 1) * costs[-1]:
            ends.append(number)
    if len(ends) < count - 1:
        raise BadInput(f"{count} stages by cost: some would be empty")
    return ends


def last_more(shape: Shape, count: int) -> list[int]:
    """The same if the last stages have more where they do not divide."""
    least, more = divmod(shape.layers, count)
    return list(accumulate(least + (k >= count - more) for k in range(count - 1)))


def filled(shape: Shape, count: int) -> list[int]:
    """The same if stages are filled one after the other with as many as the largest must have."""
    most = -(-shape.layers // count)
    return [min(most * (k + 1), shape.layers - (count - 1 - k)) for k in range(count - 1)]


SPLITS: Mapping[str, Callable[[Shape, int], list[int]]] = {
    "even": even,
    "by_cost": by_cost,
    "last_more": last_more,
    "filled": filled,
}
