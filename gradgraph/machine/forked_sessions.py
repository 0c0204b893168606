"""onnxruntime sessions in forked processes.

A fork copies a session, but not the threads of its pool. Destroying the copy waits for these threads forever, so the
first garbage collection in a worker of a data loader could hang. Sessions that live longer than a function are
therefore registered here, and a forked process never destroys those that it inherited.
"""

from __future__ import annotations

import ctypes
import os
import weakref

import onnxruntime as ort

_registered: weakref.WeakSet[ort.InferenceSession] = weakref.WeakSet()


def survives_forks(session: ort.InferenceSession) -> ort.InferenceSession:
    """Return ``session``, after registering it."""
    _registered.add(session)
    return session


def _keep_forever() -> None:
    for session in _registered:  # no list of them would do, since the interpreter clears lists when it exits
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_forever)
