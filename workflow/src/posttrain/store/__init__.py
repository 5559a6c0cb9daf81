"""The paths of a run, the receipts that prove steps done, and durable writes.

A step is done when its receipt exists. The receipt is written last: first the data is on disk (fsync), then the receipt
is on disk under a temporary name, then a rename makes it visible and its folder is synced. So a kill or a power cut
leaves either no receipt or a valid one.

A folder is built under `{name}.partial`, where a later attempt reuses the finished files of an earlier one, and gets
its final name when it is complete. A receipt is deterministic: it contains the files with sizes and content hashes, the
digests of its input receipts, and the relevant settings. Times, host and attempts go into a separate log file.
"""

from posttrain.config.load import digest8
from posttrain.store.building import building
from posttrain.store.data_folders import pass_folders, suite_folders
from posttrain.store.durable import (
    HASH_CHUNK_BYTES,
    append_json_line,
    hash_file,
    make_next_folder,
    place_atomic,
    sync_folder,
    sync_tree,
    write_atomic,
    write_json,
    write_text,
)
from posttrain.store.format_versions import FORMAT_VERSIONS
from posttrain.store.names import RelativeName
from posttrain.store.paths import (
    COVERAGE_NAME,
    MANIFEST_NAME,
    Paths,
    manifest_of,
    part_receipt_of,
    partial_of,
    receipt_of,
    records_of,
)
from posttrain.store.plain_json import parse_json, read_json
from posttrain.store.receipts import (
    FileRecord,
    Receipt,
    check_files,
    claim,
    read_receipt,
    read_records,
    record_file,
    record_files,
    refuse_files,
    require_files,
    write_receipt,
)

__all__ = [
    "COVERAGE_NAME",
    "FORMAT_VERSIONS",
    "HASH_CHUNK_BYTES",
    "MANIFEST_NAME",
    "FileRecord",
    "Paths",
    "Receipt",
    "RelativeName",
    "append_json_line",
    "building",
    "check_files",
    "claim",
    "digest8",
    "hash_file",
    "make_next_folder",
    "manifest_of",
    "parse_json",
    "part_receipt_of",
    "partial_of",
    "pass_folders",
    "place_atomic",
    "read_json",
    "read_receipt",
    "read_records",
    "receipt_of",
    "record_file",
    "record_files",
    "records_of",
    "refuse_files",
    "require_files",
    "suite_folders",
    "sync_folder",
    "sync_tree",
    "write_atomic",
    "write_json",
    "write_receipt",
    "write_text",
]
