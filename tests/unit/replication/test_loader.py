from __future__ import annotations

import pytest

from tidelog.protocol.messages import metadata_records as kafka
from tidelog.replication.controller.metadata.loader import MetadataLoader
from tidelog.replication.controller.metadata.record_codec import LATEST_METADATA_VERSION, encode_record
from tidelog.replication.controller.metadata.records import MetadataError

BEGIN = kafka.BeginTransactionRecord(name="big")
END = kafka.EndTransactionRecord()
ABORT = kafka.AbortTransactionRecord(reason=None)


def level(number):
    return kafka.FeatureLevelRecord(name="f", feature_level=number)


def load(*batches):
    loader = MetadataLoader()
    for offset, batch in enumerate(batches):
        loader.feed([encode_record(record, LATEST_METADATA_VERSION) for record in batch], offset, 1, 0)
    return loader


def features(*batches):
    return load(*batches).finish()[0].features


def test_a_transaction_counts_when_it_ends_also_over_several_batches():
    assert features([BEGIN, level(1)], [level(2)], [level(3), END]) == {"f": 3}


def test_an_open_transaction_does_not_count():
    loader = load([level(1)], [BEGIN, level(2)])
    assert loader.in_transaction
    image, _ = loader.finish()
    assert image.features == {"f": 1}
    assert image.offset == 1


def test_an_aborted_transaction_does_not_count_and_what_follows_does():
    assert features([level(1), BEGIN, level(2), ABORT]) == {"f": 1}
    assert features([level(1), BEGIN, level(2), ABORT, level(4)]) == {"f": 4}


@pytest.mark.parametrize("batch", [[END], [ABORT], [BEGIN, BEGIN], [BEGIN, END, END]])
def test_a_transaction_out_of_place_is_an_error(batch):
    with pytest.raises(MetadataError):
        load(batch)


def test_unknown_kinds_are_counted_and_kept():
    loader = MetadataLoader()
    loader.feed([b"\x01\x63\x00a", b"\x01\x63\x00b"], 1, 1, 0)
    image, _ = loader.finish()
    assert loader.unknown_kinds == {0x63: 2}
    assert len(image.carried) == 2
