"""Gradients after dp: what the memory model knows of how they are summed over tp."""

from autopar.runtime import gradients
from passes import memory


def test_the_memory_model_counts_the_buckets_that_the_runtime_sums():
    assert memory.BUCKET_BYTES == gradients.BUCKET_BYTES
