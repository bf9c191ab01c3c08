"""The layers of its teacher that a student starts from. Torch-free: the memory plan asks too."""

from __future__ import annotations

from collections.abc import Sequence


def kept_layers(wanted: int | Sequence[int], *, num_layers: int) -> list[int]:
    """Return the numbers of the kept ones of a teacher's `num_layers` layers, counted from 0, in order.

    A number of layers is spread evenly and includes the last, which feeds the heads: DistilBERT is likewise
    initialised from every second layer of BERT (Sanh et al. 2019, section 3). Raises ValueError where the
    teacher has too few.
    """
    if isinstance(wanted, int):
        if wanted >= num_layers:
            raise ValueError(
                f"{wanted} layers cannot be kept: the teacher has only {num_layers}; keep at most "
                f"{num_layers - 1}"
            )
        return [(place + 1) * num_layers // wanted - 1 for place in range(wanted)]
    layers = list(wanted)
    if layers[-1] >= num_layers:
        raise ValueError(
            f"the teacher has no layer {layers[-1]}: its {num_layers} layers are numbered 0 to "
            f"{num_layers - 1}"
        )
    if len(layers) == num_layers:
        raise ValueError(f"the list names all {num_layers} layers of the teacher: leave some out")
    return layers
