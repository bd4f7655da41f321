"""Device memory that several processes use: allocated by one, opened by the others (CUDA IPC).

Owns: allocation, export, opening, release. Must not know: what lies in it.
"""

from __future__ import annotations

from cuda.bindings import driver as cu

from vllm_expertplex.cuda.driver import check

# Smaller allocations share a block with others, which IPC would then expose as well.
_BLOCK = 2 << 20


class DeviceMemory:
    """`size` bytes at `address` on the current device; needs a current context.

    Memory must be released before a resident kernel starts or after it has ended: freeing waits
    for the kernel.
    """

    def __init__(self, address: int, size: int, owned: bool) -> None:
        self.address, self.size, self._owned = address, size, owned

    @classmethod
    def allocate(cls, size: int) -> DeviceMemory:
        """Zeroed memory of this process. Raises RuntimeError where the GPU has too little."""
        whole = -(-size // _BLOCK) * _BLOCK
        address = int(check(cu.cuMemAlloc(whole), f"allocating {whole} B of GPU memory"))
        check(cu.cuMemsetD8(address, 0, whole), f"zeroing {whole} B of GPU memory")
        check(cu.cuCtxSynchronize(), "zeroing GPU memory")
        return cls(address, size, True)

    @classmethod
    def open(cls, handle: bytes, size: int) -> DeviceMemory:
        """Another process' memory, also on another GPU. Raises RuntimeError where the GPUs cannot
        reach each other, or the process that owns it is gone.
        """
        exported = cu.CUipcMemHandle()
        exported.reserved = handle
        peer = int(cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        address = check(
            cu.cuIpcOpenMemHandle(exported, peer),
            f"opening {size} B of another process' GPU memory",
        )
        return cls(int(address), size, False)

    def export(self) -> bytes:
        """The handle by which other processes open this memory, as long as this process lives."""
        handle = check(cu.cuIpcGetMemHandle(self.address), f"exporting {self.size} B of GPU memory")
        return bytes(handle.reserved)

    def close(self) -> None:
        if self._owned:
            check(cu.cuMemFree(self.address), f"freeing {self.size} B of GPU memory")
        else:
            check(cu.cuIpcCloseMemHandle(self.address), "closing another process' GPU memory")


def current_device_uuid() -> str:
    """The current GPU's UUID as nvidia-smi prints it: `GPU-xxxxxxxx-...`."""
    device = check(cu.cuCtxGetDevice(), "finding the current GPU")
    raw = bytes(check(cu.cuDeviceGetUuid(device), "reading the GPU's UUID").bytes).hex()
    return "GPU-" + "-".join((raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:]))
