"""stanford-stk's Matrix as far as megablocks 0.10 used it: built from eight arguments, read by attributes."""

import torch


class FakeStk:
    def __init__(self, size, data, row_indices, column_indices, offsets, column_indices_t, offsets_t, block_offsets_t):
        self._size, self.data, self.offsets, self.offsets_t = size, data, offsets, offsets_t
        self.row_indices, self.column_indices = row_indices, column_indices
        self.column_indices_t, self.block_offsets_t = column_indices_t, block_offsets_t

    def size(self):
        return self._size

    def is_contiguous(self):
        return True

    @classmethod
    def of(cls, pattern):
        """The used blocks of one of our patterns, indices as narrow as stk's; without data as 0.10's topology."""
        b = pattern.blocks
        used = int(b.offsets[-1])
        data = torch.empty(used, pattern.block_size, pattern.block_size, device="meta")
        if pattern.data is not None:
            data = pattern.data[:used].clone()
        rows, columns = (t[:used].short() for t in (b.row_indices, b.column_indices))
        by_column = b.column_indices_t[:used].short(), b.offsets_t, b.block_offsets_t[:used]
        return cls(torch.Size(pattern.shape), data, rows, columns, b.offsets, *by_column)
