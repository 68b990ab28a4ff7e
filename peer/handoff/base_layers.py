"""The frozen base of adapters: its layers on this peer, and how the peer gets missing ones.

The run's spec has a digest of each layer (`initial.digests`), so the sender of a layer need not be trusted. A peer
looks for a layer on its own disk, then in this machine's folder with the model (the host's, or a volunteer's own copy),
and then asks the members of the plan. Layers stay on the disk as long as the run does, so each travels to a peer once,
and every peer that has held a layer can send it. A peer that keeps a copy of a stage's state also gets the stage's base
(`copies.py`): if all members of the stage die, its base is not lost.

If the head is the embedding (`model.tied`), both layers begin with the same bytes, which a peer fetches once.

If the spec has no digests, each peer makes the base from the run's seed, and nothing is fetched.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final

import torch
from torch import Tensor

from shoal.peer.base.tolerating import Tolerating
from shoal.peer.compute.arithmetic import Arithmetic
from shoal.peer.handoff.fetcher import FetchProgress, StateFetcher, Unfinished
from shoal.peer.handoff.inbox import ChunkInbox, ranges
from shoal.peer.handoff.initial import InitialWeights, bare_layer, initial_digests
from shoal.peer.handoff.server import INITIAL, StateServer
from shoal.peer.model.frozen import adapter_of, base_numel
from shoal.peer.presence.ports import Ports
from shoal.protocol.durable import replace_file
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerID
from shoal.protocol.layers import EMBED, HEAD, all_layer_keys
from shoal.protocol.spec import RunSpec

logger = logging.getLogger(__name__)

FOLDER: Final = "base"
"""Folder inside the run's folder, with one file of bytes for each layer."""
_MADE: Final = ("int8", "nf4")
"""Formats that take long to make from the model's files: the result is kept on disk like a fetched layer."""


class BaseLayers:
    """The base layers of one peer: on disk in the run's folder, or in memory if the peer has no disk. Implements
    `InitialWeights`, by which the server sends them to other peers.

    Args: server: shares the ranges that a fetch receives.
    """

    def __init__(
        self,
        spec: RunSpec,
        ports: Ports,
        *,
        inbox: ChunkInbox,
        arithmetic: Arithmetic,
        server: StateServer,
    ) -> None:
        self.model_folder: InitialWeights | None = None
        """This machine's copy of the model; it returns layers in the form of `stored_base`. None: there is no copy."""
        self._spec = spec
        self._endpoint, self._compute = ports.endpoint, ports.compute
        self._disk, self._run_blocking = ports.disk, ports.run_blocking
        self._inbox, self._arithmetic, self._server = inbox, arithmetic, server
        self._folder = PurePosixPath(ports.endpoint.run) / FOLDER
        self._digests = initial_digests(spec) if spec.initial.digests else {}
        self._in_memory: dict[str, Tensor] = {}
        self._not_in_folder: set[str] = set()
        """Layers that `model_folder` lacks, or has with other bytes."""
        self._fetching = asyncio.Lock()
        self.progress: FetchProgress | None = None
        """Progress of the fetch that is under way; None: there is none."""

    async def read(self, keys: Sequence[str]) -> Mapping[str, Tensor]:
        """Return the requested layers that this peer has, in the form of `stored_base`."""
        known = [key for key in keys if key in all_layer_keys(self._spec.model)]
        return {key: stored for key in known if (stored := await self._here(key)) is not None}

    async def get(
        self, keys: Sequence[str], holders: Sequence[PeerID], *, group_peers: Collection[PeerID] = ()
    ) -> Mapping[str, Tensor]:
        """Return the layers `keys`. Missing layers are fetched one by one, so that a failure loses no fetched layer.

        Args: holders: peers to ask. group_peers: peers that need the same layers now; each passes on what it gets.
        Raises: Unreachable, Refused, RemoteError: no peer has sent one of the layers.
        """
        found = dict(await self.read(keys))
        if len(found) < len(keys):
            async with self._fetching:
                found |= await self.read([key for key in keys if key not in found])
                missing = [key for key in keys if key not in found]
                total = sum(base_numel(self._spec, key) for key in missing)
                self.progress = FetchProgress(total=total, what="the frozen base")
                try:
                    for key in missing:
                        found[key] = await self._fetch(key, holders, group_peers)
                finally:
                    self.progress = None
        return {key: found[key] for key in keys}

    async def get_ready(self, keys: Sequence[str], holders: Sequence[PeerID]) -> None:
        """Get layers that will be needed later, one by one, during training. Skip a layer that no peer sends."""
        for key in keys:
            with Tolerating(logger.info, f"no base of {key} yet"):
                await self.get([key], holders)

    # --- here ---

    async def _here(self, key: str) -> Tensor | None:
        if not self._spec.initial.digests:
            return await self._compute.run_on_host(lambda: self._arithmetic.seed_base(key))
        if key in self._in_memory:
            return self._in_memory[key]
        for look in (self._from_disk, self._from_head, self._from_folder):
            stored = await look(key)
            if stored is not None:
                return stored
        return None

    async def _from_disk(self, key: str) -> Tensor | None:
        disk = self._disk
        if disk is None:
            return None
        found: list[bytes] = []

        def read() -> None:
            if f"{key}.bin" in disk.list(self._folder):
                found.append(disk.read(self._folder / f"{key}.bin"))

        try:
            await self._run_blocking(read)
        except OSError as error:
            logger.warning("cannot read the base of %s: %s", key, error.strerror or error)
        if not found or len(found[0]) != 4 * base_numel(self._spec, key):
            return None
        stored = torch.frombuffer(bytearray(found[0]), dtype=torch.float32)
        if await self._is_foreign(key, stored):
            logger.warning("the base of %s on this disk is damaged: fetching it again", key)
            return None
        return stored

    async def _from_head(self, key: str) -> Tensor | None:
        """Return the embedding, cut from a stored head (a tied model's head begins with it); None: no usable head."""
        if key != EMBED or not self._spec.model.tied:
            return None
        head = self._in_memory[HEAD] if HEAD in self._in_memory else await self._from_disk(HEAD)
        if head is None or await self._is_foreign(EMBED, stored := head[: base_numel(self._spec, EMBED)]):
            return None
        await self._keep(EMBED, stored)
        return stored

    async def _from_folder(self, key: str) -> Tensor | None:
        if self.model_folder is None or key in self._not_in_folder:
            return None
        try:
            read = await self.model_folder.read([key])
        except LocalError as error:
            logger.warning("cannot read the base from its folder: %s", error)
            read = {}
        if key in read:
            if not await self._is_foreign(key, read[key]):
                if adapter_of(self._spec).base in _MADE:
                    await self._keep(key, read[key])
                return read[key]
            logger.warning(
                "%s differs between this machine's copy of the model and the run's: asking others for it", key
            )
        self._not_in_folder.add(key)
        return None

    # --- from others ---

    async def _fetch(self, key: str, holders: Sequence[PeerID], group_peers: Collection[PeerID]) -> Tensor:
        """Fetch a layer, and keep it on disk; without a disk, in memory."""
        fetcher = StateFetcher(self._spec, (key,), self._inbox, progress=self.progress)
        others = [peer for peer in holders if peer != self._endpoint.peer_id]
        with self._server.sharing(group_peers) as relay:
            state = await fetcher.fetch(
                others,
                version=0,
                stored_era=INITIAL,
                expected=self._digests,
                begun=await self._begun_by_embedding() if key == HEAD and self._spec.model.tied else None,
                relay=relay,
                carriers=others[1:],
            )
        stored = state.layers[key].param_N
        await self._keep(key, stored)
        return stored

    async def _begun_by_embedding(self) -> dict[str, Unfinished]:
        """Return what we have of a tied model's head, for a fetch: its beginning, the embedding, in whole ranges."""
        embedding, vectors = (await self.read([EMBED])).get(EMBED), self._arithmetic.vectors
        if embedding is None:
            return {}
        head_N = vectors.empty(base_numel(self._spec, HEAD))
        here = [(start, stop) for start, stop in ranges(head_N.numel(), vectors) if stop <= embedding.numel()]
        for start, stop in here:
            head_N[start:stop] = embedding[start:stop]
        tensors = head_N, vectors.empty(0), vectors.empty(0)
        return {HEAD: Unfinished(0, self._digests[HEAD], tensors, {(0, start) for start, _ in here})}

    async def _keep(self, key: str, stored: Tensor) -> None:
        disk = self._disk
        if disk is None:
            self._in_memory[key] = stored
            return
        payload, path = self._arithmetic.vectors.payload_of(stored), self._folder / f"{key}.bin"
        try:
            await self._run_blocking(lambda: replace_file(disk, path, payload))
        except OSError as error:
            logger.error("cannot keep the base of %s: %s", key, error.strerror or error)
            self._in_memory[key] = stored

    # --- comparison with the spec ---

    async def _is_foreign(self, key: str, stored: Tensor) -> bool:
        layer = bare_layer(stored, self._arithmetic.vectors)
        return await self._compute.run_on_host(lambda: layer.secure_digest() != self._digests[key])
