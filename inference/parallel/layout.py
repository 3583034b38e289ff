"""The position of a rank in the tensor x pipeline grid, and its part of the model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelLayout:
    """One rank of `tp_size` x `pp_size`; tensor-parallel ranks are consecutive.

    rank = pp_rank * tp_size + tp_rank, as FasterTransformer numbers them.
    """

    rank: int = 0
    tp_size: int = 1
    pp_size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size, f"rank {self.rank} of {self.world_size}"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp_size * self.pp_size

    @property
    def tp_rank(self) -> int:
        """Index among the ranks of this stage, which share each layer."""
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        """Index of this rank's pipeline stage."""
        return self.rank // self.tp_size

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds the tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits."""
        return self.pp_rank == self.pp_size - 1

    @property
    def tp_ranks(self) -> list[int]:
        """The ranks of this stage, this one included."""
        first = self.pp_rank * self.tp_size
        return list(range(first, first + self.tp_size))

    @property
    def last_stage_ranks(self) -> range:
        """The ranks of the last stage, which compute the logits."""
        return range(self.world_size - self.tp_size, self.world_size)

    @property
    def previous_rank(self) -> int:
        """The rank of the previous stage that sends hidden states to this one."""
        assert not self.is_first_stage
        return self.rank - self.tp_size

    @property
    def next_rank(self) -> int:
        """The rank of the next stage that receives this one's hidden states."""
        assert not self.is_last_stage
        return self.rank + self.tp_size

    def layers(self, num_layer: int) -> range:
        """Return the global numbers of this stage's layers.

        Raises:
            ValueError: The layers cannot be divided equally among the stages.
        """
        if num_layer % self.pp_size:
            raise ValueError(
                f"pipeline_para_size={self.pp_size} does not divide num_layer={num_layer}; use "
                f"{', '.join(str(n) for n in range(1, num_layer + 1) if num_layer % n == 0)}"
            )
        count = num_layer // self.pp_size
        return range(self.pp_rank * count, (self.pp_rank + 1) * count)

    def vocab_rows(self, vocab_size: int) -> range:
        """Return this rank's rows of the vocabulary; the last ranks may hold fewer, or none."""
        rows = self.vocab_rows_per_rank(vocab_size)
        first = min(self.tp_rank * rows, vocab_size)
        return range(first, min(first + rows, vocab_size))

    def vocab_rows_per_rank(self, vocab_size: int) -> int:
        """Return the most vocabulary rows of any rank, the width of slices of logits."""
        return -(-vocab_size // self.tp_size)
