"""In which order layers are gathered into which buffer, and when each may be overwritten.

Owns: that order. Must not know: threads, streams, tensors.

Layer i always goes to buffer i % 2, so that a layer's weights have fixed addresses. Layers are
gathered round and round: while the last layers of one pass are computed, the first ones of the next
are on their way. With an odd number of layers the first and the last share a buffer, and gathering
the first waits for the last to be computed; the layer before them, which every rank holds whole,
covers that.
"""


class GatherOrder:
    """Counts fills and uses. A ticket is one gather of one layer; ticket t is of layer t % layers.

    One party fills tickets in order (`may_fill`, `layer_to_fill`, `filled`), another uses them in
    order (`ready`, `used`). Not thread-safe.
    """

    BUFFERS = 2

    def __init__(self, layers: int) -> None:
        if layers < 1:
            raise ValueError(f"{layers} layers: there is nothing to gather")
        self.layers = layers
        self._filled = 0
        self._used = 0

    @property
    def stays(self) -> bool:
        """Whether every layer has a buffer to itself, and one gather is enough for ever."""
        return self.layers <= self.BUFFERS

    def buffer(self, layer: int) -> int:
        return layer % self.BUFFERS

    @property
    def layer_to_fill(self) -> int:
        return self._filled % self.layers

    def may_fill(self) -> bool:
        """Whether the buffer of the next ticket holds nothing that is still to be used."""
        ticket = self._filled
        if self.stays:
            return ticket < self.layers
        if ticket < self.BUFFERS:
            return True
        return self._used > self._previous(ticket)

    def _previous(self, ticket: int) -> int:
        """The ticket whose layer is in the buffer that `ticket` goes to."""
        if ticket % self.layers >= self.BUFFERS:
            return ticket - self.BUFFERS
        # The last layer of the pass before that shares the buffer.
        wanted = self.buffer(ticket % self.layers)
        start = ticket - ticket % self.layers
        return next(t for t in (start - 1, start - 2) if self.buffer(t % self.layers) == wanted)

    def filled(self) -> None:
        """The gather of `layer_to_fill` is complete."""
        self._filled += 1

    def ready(self, layer: int) -> bool:
        """Whether `layer`, which must be the next in order, can be computed.

        Raises RuntimeError when another layer is next: its weights are not in the buffer.
        """
        if layer != self._used % self.layers:
            raise RuntimeError(
                f"MoE layer {layer} (of those gathered) was asked for, expected layer "
                f"{self._used % self.layers}: AsyncEP needs every forward pass to run all layers "
                "in order"
            )
        return self._filled > (layer if self.stays else self._used)

    def used(self) -> None:
        """The layer last found ready has been computed."""
        self._used += 1
