"""What `native_tokens.c` offers where it was built."""

import numpy as np
import numpy.typing as npt

def halved(ids: npt.NDArray[np.integer], /) -> bytes | None:
    """Return the lower halves of contiguous int64 numbers; None where one is not from 0 to 2**32 - 1."""
