"""Names that a head may have: each names a column, a module of the classifier and a JSON key."""

from __future__ import annotations

HEAD_NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9_-]{0,63}$"

_DATASET_COLUMNS = frozenset({"text", "text_pair", "line"})  # of the stored Parquet files
# Attributes of torch's ModuleDict, which holds the heads and rejects them as keys; `smart_apply` is
# added to every module by transformers.
_MODULE_DICT_ATTRIBUTES = frozenset(
    {
        "T_destination",
        "add_module",
        "apply",
        "bfloat16",
        "buffers",
        "call_super_init",
        "children",
        "clear",
        "compile",
        "cpu",
        "cuda",
        "double",
        "dump_patches",
        "eval",
        "extra_repr",
        "float",
        "forward",
        "get_buffer",
        "get_extra_state",
        "get_parameter",
        "get_submodule",
        "half",
        "ipu",
        "items",
        "keys",
        "load_state_dict",
        "modules",
        "mtia",
        "named_buffers",
        "named_children",
        "named_modules",
        "named_parameters",
        "parameters",
        "pop",
        "register_backward_hook",
        "register_buffer",
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
        "register_load_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "register_module",
        "register_parameter",
        "register_state_dict_post_hook",
        "register_state_dict_pre_hook",
        "requires_grad_",
        "set_extra_state",
        "set_submodule",
        "share_memory",
        "smart_apply",
        "state_dict",
        "to",
        "to_empty",
        "train",
        "training",
        "type",
        "update",
        "values",
        "xpu",
        "zero_grad",
    }
)


def is_reserved_head_name(name: str) -> bool:
    """Return whether no head may have this name."""
    return name in _DATASET_COLUMNS or name in _MODULE_DICT_ATTRIBUTES


def check_head_names(names: list[str]) -> None:
    """Raise ValueError for a reserved or a repeated name."""
    for name in names:
        if name in _DATASET_COLUMNS:
            raise ValueError(
                f"heads: {name!r} is a column of every stored dataset; rename the head"
            )
        if name in _MODULE_DICT_ATTRIBUTES:
            raise ValueError(
                f"heads: {name!r} is an attribute of torch's ModuleDict and cannot name a head; "
                f'choose another name and give {{"column": {name!r}}}'
            )
        if names.count(name) > 1:
            raise ValueError(f"heads: {name!r} is declared twice")
