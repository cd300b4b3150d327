"""From rows of tokens to finished batches: a hash that is equal in all layouts, tensors, and a thread that reads ahead."""
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch


def scramble(x: np.ndarray) -> np.ndarray:
    """uint64 to uint64, a bijection; neighbouring numbers end far apart."""
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return x ^ (x >> np.uint64(32))


def hash_sequences(tokens: np.ndarray, labels: np.ndarray, first_row: int) -> int:
    """A number below 2**48 for some rows (sequences, T) of a global batch. The sum over all rows, modulo 2**48, is the same
    in every layout, and differs if a token, a label or the order of the rows changes. first_row: number of the first row."""
    weights = scramble(np.arange(1, tokens.shape[1] + 1, dtype=np.uint64)) | np.uint64(1)  # odd: no change is multiplied away
    pairs = tokens.astype(np.uint64) + (labels.astype(np.uint64) << np.uint64(32))
    rows = np.arange(first_row + 1, first_row + 1 + len(tokens), dtype=np.uint64)
    return int(scramble((pairs * weights).sum(1, dtype=np.uint64) + scramble(rows)).sum(dtype=np.uint64)) % 2**48


def to_tensors(arrays, local_batch_size: int) -> list:
    """Each array (sequences, T) as a tensor (A, B, T)."""
    return [a if a is None else torch.from_numpy(a.reshape(-1, local_batch_size, a.shape[-1]).copy()) for a in arrays]


def prefetch(batches, device: torch.device):
    """Yields the batches on `device`. A thread keeps two ready, so that reading and hashing cost the training step nothing.

    An error in the thread is raised here. The thread ends with the generator (close(), garbage collection) or at exit."""
    gpu = None if device.type != "cuda" else torch.cuda.current_device() if device.index is None else device.index

    def on_tensors(change, batch):
        return type(batch)(**{name: change(value) if torch.is_tensor(value) else value for name, value in vars(batch).items()})

    def load():
        batch = next(batches, None)
        return batch if gpu is None or batch is None else on_tensors(torch.Tensor.pin_memory, batch)

    # a new thread is on GPU 0, and pinning there would cost every rank a context on it
    thread = ThreadPoolExecutor(1, "prefetch", *(() if gpu is None else (torch.cuda.set_device, (gpu,))))
    try:
        ready = deque(thread.submit(load) for _ in range(2))
        while (batch := ready.popleft().result()) is not None:
            ready.append(thread.submit(load))
            yield batch if gpu is None else on_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)
    finally:  # the garbage collector may close us in any thread, also in our own, and a thread must not wait for itself
        thread.shutdown(wait=not threading.current_thread().name.startswith("prefetch"), cancel_futures=True)
