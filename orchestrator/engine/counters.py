"""What has happened since the engine was opened?"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(slots=True)
class Counters:
    """Totals since the engine was opened; the engine's thread alone writes to them.

    Tokens: `prefilled` prompt tokens evaluated, `reused` not evaluated because a checkpoint held
    them, `replayed` evaluated again after a preemption, `sampled`. `waited` requests that waited
    for a prefix, `preempted` lanes that made way. `recoveries`: how often every state in the pool
    was dropped after a failed decode. Checkpoints: `kept`, `evicted` (dropped for good),
    `exported`, `imported`, and `refused` (imports and copies that failed); `snapshot_bytes` of
    recurrent states taken apart from their rows. `decode_calls` of llama.cpp's decode.
    """

    requests: int = 0
    prefilled: int = 0
    reused: int = 0
    replayed: int = 0
    sampled: int = 0
    waited: int = 0
    preempted: int = 0
    cancelled: int = 0
    expired: int = 0
    busy: int = 0
    kept_checkpoints: int = 0
    evicted_checkpoints: int = 0
    exported_checkpoints: int = 0
    imported_checkpoints: int = 0
    refused_checkpoints: int = 0
    snapshot_bytes: int = 0
    recoveries: int = 0
    decode_calls: int = 0

    def snapshot(self) -> Counters:
        """Return a copy that does not change any more."""
        return replace(self)
