"""`penstock buffer dump`: a manifest, or one batch, as JSON."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import click

from penstock.buffer import (
    FOOTER_BYTES,
    MANIFEST_VERSION,
    CompressionType,
    ConsumerConfig,
    Entry,
    Manifest,
    decode_batch,
    decode_manifest,
    find_tag,
)
from penstock.cli.buffer.target import Queue, Target, queue_options, queues_of, run
from penstock.cli.display import print_json
from penstock.cli.failure import ExitCode, report
from penstock.errors import InvalidInput, NotFound, PenstockError

__all__ = ["dump"]


@click.command()
@queue_options
@click.option("--batch", metavar="KEY|SEQ", help="Dump this batch instead of the manifest.")
@click.option("--shard", type=click.IntRange(min=0), help="Of a sharded queue, which shard.")
def dump(
    store: str | None,
    manifest: str | None,
    prefix: str | None,
    config: str | None,
    store_options: tuple[str, ...],
    as_json: bool,
    batch: str | None,
    shard: int | None,
) -> int:
    """Print the manifest of the queue at STORE, or a manifest file on this machine, as JSON.

    With --batch, a batch by its sequence or its key: its records in base64. Any error ends with exit code 1.
    """
    try:
        if store is not None and os.path.isfile(store):
            print_json(_dump_file(store, batch))
        else:
            target = Target.of(
                store, config=config, manifest=manifest, prefix=prefix, store_options=store_options
            )
            print_json(run(_dump(target, batch, shard)))
    except PenstockError as error:
        report(error)
        return ExitCode.PROBLEM
    return ExitCode.OK


def _dump_file(path: str, batch: str | None) -> dict[str, object]:
    if batch is not None:
        raise InvalidInput(f"{path} is a file; --batch needs the store that the batch is in")
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}") from error
    return _manifest_object(decode_manifest(raw))


async def _dump(target: Target, batch: str | None, shard: int | None) -> dict[str, object]:
    async with target.open(ConsumerConfig) as config:
        if batch is not None and not batch.isdigit():
            plain = await queues_of(config, required=False)
            return await _batch_object(plain[0], batch, None)
        queue = _choose(await queues_of(config), shard)
        if batch is None:
            return _manifest_object(decode_manifest((await queue.reader.require()).raw))
        return await _queued_batch(queue, int(batch))


def _choose(queues: list[Queue], shard: int | None) -> Queue:
    chosen = [queue for queue in queues if queue.shard == shard]
    if chosen:
        return chosen[0]
    shards = sum(queue.shard is not None for queue in queues)
    if shard is None:
        raise InvalidInput(f"the queue has {shards} shards: say which with --shard 0 to {shards - 1}")
    if not shards:
        raise InvalidInput("the queue is not sharded: leave --shard out")
    raise InvalidInput(f"there is no shard {shard}: the queue has 0 to {shards - 1}")


async def _queued_batch(queue: Queue, sequence: int) -> dict[str, object]:
    index = await queue.reader.index()
    if not index.first <= sequence < index.footer.next_sequence:
        there = f"{index.first} to {index.footer.next_sequence - 1}" if len(index) else "nothing: it is empty"
        raise NotFound(f"sequence {sequence} is not in the queue, which holds {there}")
    return await _batch_object(queue, index[sequence - index.first].location, sequence)


async def _batch_object(queue: Queue, location: str, sequence: int | None) -> dict[str, object]:
    try:
        data = (await queue.store.get(location)).data
    except NotFound as error:
        raise NotFound(f"there is no batch {location} in {queue.store.url}") from error
    block = decode_batch(data, bytes_max=queue.config.batch_bytes_max)
    return {
        "sequence": sequence,
        "location": location,
        "object_bytes": len(data),
        "compression": CompressionType(data[len(data) - FOOTER_BYTES]).name.lower(),
        "record_count": len(block),
        "records": [base64.b64encode(record).decode() for record in block.to_list()],
    }


def _manifest_object(found: Manifest) -> dict[str, object]:
    """The shape that other tools of the format print; `transaction` only where there is one."""
    return {
        "version": MANIFEST_VERSION,
        "epoch": found.footer.epoch,
        "next_sequence": found.footer.next_sequence,
        "entries": [
            {
                "sequence": entry.sequence,
                "location": entry.location,
                "metadata": [
                    {
                        "start_index": meta.start_index,
                        "ingestion_time_ms": meta.ingestion_time_ms,
                        "payload_base64": base64.b64encode(meta.payload).decode(),
                    }
                    for meta in entry.metadata
                ],
                **_transaction_object(entry),
            }
            for entry in found.entries
        ],
    }


def _transaction_object(entry: Entry) -> dict[str, object]:
    tag = find_tag(entry.tail)
    return {} if tag is None else {"transaction": {"app": tag.app, "version": tag.version}}
