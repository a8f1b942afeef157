"""Triton's interpreter, with what it does wrong put right."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.runtime.interpreter as interpreter


def mend_the_interpreter() -> None:
    """It multiplies bfloat16 as if its bits were integers, and cannot count to a number that a kernel computes (numpy 2.4).

    And for each call of a function inside a kernel it replaces the language's functions again, which takes a third of its time.
    """
    plain_dot, plain_patch = interpreter.InterpreterBuilder.create_dot, interpreter._patch_lang_tensor
    plain_replace = interpreter._patch_lang

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != interpreter.tl.bfloat16:
            return handle
        data = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, interpreter.tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return plain_dot(self, wide(a), wide(b), *more)

    def patch(tensor: Any, scope: Any) -> None:
        plain_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def replace(function: Any) -> Any:
        core = interpreter.tl.core
        seen = [each for each in function.__globals__.values() if each is core or each is interpreter.tl]
        if any(core.is_builtin(each.load) for each in seen):
            return plain_replace(function)
        return interpreter._LangPatchScope()  # with nothing to put back

    interpreter._patch_lang = replace
    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter._patch_lang_tensor = patch
