"""The laws of a storage, on every kind of it: a disk, fsspec's memory, an S3 server."""

import errno
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from http.client import HTTPConnection
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import ClassVar

import fsspec
import fsspec.implementations.memory
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ffmem.errors import StorageFull, StoreError
from ffmem.storage import READ_AHEAD, ObjectStorage, open_storage

_NUMBER = count()
SERVER = """
import sys
from moto.backends import get_backend
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
for line in sys.stdin:  # names of objects to make, faster than by the protocol
    (backend,) = [account["aws"] for account in get_backend("s3").values()]
    for key in line.split():
        backend.put_object("tests", key, b"x")
    print("done", flush=True)
server.stop()
"""
KINDS = ["local", "memory", "s3"]
WRITER = """
import sys
from ffmem.storage import open_storage
place, letter = sys.argv[1:]
shared = open_storage(place)
for n in range(6):
    shared.write_text("same", letter * 300_000)
"""


@pytest.fixture(scope="session")
def server():
    """Start a server that speaks S3; it ends when its input does."""
    if find_spec("moto") is None or find_spec("flask_cors") is None:
        pytest.skip("the S3 server of these tests is moto's, which is not installed")
    command = [sys.executable, "-c", SERVER]
    with (
        pytest.MonkeyPatch.context() as patch,
        subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True) as server,
    ):
        patch.setenv("AWS_ACCESS_KEY_ID", "tests")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "tests")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield server
        server.stdin.close()


@pytest.fixture(scope="session")
def s3(server):
    """Return the server's `host:port`."""
    endpoint = f"127.0.0.1:{int(server.stdout.readline())}"
    request(endpoint, "PUT", "/tests")
    return endpoint


def request(endpoint, method, path, body=""):
    """Speak S3 by hand."""
    with closing(HTTPConnection(endpoint)) as connection:
        connection.request(method, path, body.encode())
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200


@pytest.fixture
def place_of(request, tmp_path):
    """Return a new place of a kind."""

    def new(kind):
        name = f"run-{next(_NUMBER)}"
        if kind == "s3":
            endpoint = request.getfixturevalue("s3")
            return f"s3://tests/{name}?endpoint_override={endpoint}&scheme=http"
        return f"memory://tests/{name}" if kind == "memory" else str(tmp_path / name)

    return new


@pytest.fixture(params=KINDS)
def shared(request, place_of):
    return open_storage(place_of(request.param))


@pytest.fixture
def far(place_of):
    return open_storage(place_of("s3"))


def temporaries():
    return {path.name for path in Path(tempfile.gettempdir()).glob("ffmem-*")}


@pytest.fixture
def fill(request):
    """Put many files into a shared folder, by another way than ours: uploads take their time."""

    def put(shared, names):
        scheme, _, path = shared.shown.rpartition("://")
        if scheme == "s3":
            server = request.getfixturevalue("server")
            keys = (f"{path}/{name}".removeprefix("tests/") for name in names)
            print(*keys, file=server.stdin, flush=True)
            assert server.stdout.readline() == "done\n"
        elif scheme == "memory":
            fsspec.filesystem("memory").pipe({f"/{path}/{name}": b"x" for name in names})
        else:
            shared.path.mkdir()
            for name in names:
                (shared.path / name).write_text("x")

    return put


def test_what_was_written_can_be_read_again_by_another_who_knows_the_place(shared):
    shared.write_text("a.txt", "ב é 𝒳\r\n\n")
    again = open_storage(shared.url)
    assert type(again) is type(shared)
    assert again.read_text("a.txt") == "ב é 𝒳\r\n\n"
    assert again.exists("a.txt")
    assert again.names() == ["a.txt"]


def test_what_is_not_there_is_told_as_such(shared):
    assert shared.names() == []
    assert shared.read_text("missing") is None
    assert not shared.exists("missing")
    shared.delete("missing")
    shared.clear()
    with pytest.raises(FileNotFoundError), shared.reading("missing"):
        pass


def fail_while_writing(shared, error):
    with shared.writing("a") as path:
        path.write_text("half a fi")
        raise error


@pytest.mark.parametrize("before", [None, "whole"])
def test_a_file_is_there_whole_or_not_at_all(shared, before):
    if before is not None:
        shared.write_text("a", before)
    with pytest.raises(KeyboardInterrupt):
        fail_while_writing(shared, KeyboardInterrupt())
    assert shared.read_text("a") == before
    assert shared.names() == ([] if before is None else ["a"])


def test_a_full_disk_is_told(shared):
    with pytest.raises(StorageFull, match="The disk is full: cannot write"):
        fail_while_writing(shared, OSError(errno.ENOSPC, "no room"))


def test_nothing_stays_on_this_machine(shared, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared.write_text("a", "x")
    with pytest.raises(RuntimeError):
        fail_while_writing(shared, RuntimeError())
    assert temporaries() == set()


def test_a_file_is_not_there_before_its_block_ends(shared):
    with shared.writing("a") as path:
        path.write_text("x")
        assert shared.names() == []
        assert not shared.exists("a")
    assert shared.names() == ["a"]


def test_written_twice_the_last_one_stands_there(shared):
    for text in ("a long first text", "short", ""):
        shared.write_text("a", text)
        assert shared.read_text("a") == text
    assert shared.names() == ["a"]


def test_nothing_but_a_file_can_be_committed(shared):
    with pytest.raises(StoreError, match="Cannot write"), shared.writing("a"):
        pass
    assert shared.names() == []


def test_names_are_in_order_and_hide_what_is_being_written(shared):
    for name in ("b", "a", "partial-1.arrow", "ä b%20c"):
        shared.write_text(name, name)
    shared.write_text(".c.0123.tmp", "killed")
    assert shared.names() == ["a", "b", "partial-1.arrow", "ä b%20c"]
    assert shared.read_text("ä b%20c") == "ä b%20c"
    shared.delete("b")
    assert shared.names() == ["a", "partial-1.arrow", "ä b%20c"]


def test_a_name_may_have_a_folder(shared):
    for name in ("values/b", "values/a", "partials/c", "d"):
        shared.write_text(name, name)
    assert shared.names("values") == ["values/a", "values/b"]
    assert shared.names("partials") == ["partials/c"]
    assert shared.names("none") == []
    assert shared.names() == ["d"]
    assert shared.read_text("values/a") == "values/a"
    shared.delete("values/a")
    assert shared.names("values") == ["values/b"]


def test_thousands_of_files_are_all_named_and_all_removed(shared, fill):
    names = [f"file-{number:05d}" for number in range(1_050)]
    fill(shared, names)
    assert shared.names() == names
    shared.clear()
    assert shared.names() == []


def test_clearing_removes_the_folder_and_nothing_beside_it(shared):
    one, other = (open_storage(shared.url, name) for name in ("run-1", "run-10"))
    one.write_text("a", "x")
    one.write_text(".a.0123.tmp", "killed")
    other.write_text("a", "y")
    one.clear()
    one.clear()
    assert one.read_text("a") is None
    assert one.read_text(".a.0123.tmp") is None
    assert other.read_text("a") == "y"
    one.write_text("a", "z")
    assert one.names() == ["a"]


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_slice_that_is_read_is_the_slice(shared, data):
    size = 2 * READ_AHEAD + 17
    written = np.random.default_rng(0).bytes(size)
    if not shared.exists("bytes"):
        with shared.writing("bytes") as path:
            path.write_bytes(written)
    with shared.reading("bytes") as file:
        assert file.size() == size
        for _ in range(3):
            first, n = data.draw(st.integers(0, size)), data.draw(st.integers(0, size))
            file.seek(first)
            assert file.read(n) == written[first : first + n]
            assert file.tell() == min(first + n, size)


def test_record_batches_are_read_one_by_one_with_what_is_said_of_each(shared):
    schema = pa.schema([("m", pa.float32()), ("p", pa.list_(pa.int64()))], {"run": "r"})
    rng = np.random.default_rng(0)
    batches = [
        pa.record_batch([pa.array(rng.random(n, np.float32)), [[i] * (i % 3) for i in range(n)]],
                        schema=schema)
        for n in (40_000, 1, 0, 9)
    ]  # fmt: skip
    with shared.writing("a.arrow") as path, pa.ipc.new_file(str(path), schema) as writer:
        for number, batch in enumerate(batches):
            writer.write_batch(batch, custom_metadata={"number": str(number)})
    with shared.reading("a.arrow") as file, pa.ipc.open_file(file) as reader:
        assert reader.schema.metadata == {b"run": b"r"}
        for number in (3, 0, 2, 1):
            batch, custom = reader.get_batch_with_custom_metadata(number)
            assert batch.equals(batches[number])
            assert custom[b"number"] == str(number).encode()


def test_a_file_of_this_machine_is_put_there_and_stays_here(shared, tmp_path):
    here = tmp_path / "here"
    here.write_text("x")
    for _ in range(2):
        shared.upload(here, "a")
        assert shared.read_text("a") == here.read_text() == "x"
    shared.write_text("a", "y")
    assert here.read_text() == "x"
    if isinstance(shared, ObjectStorage):
        return
    assert [path.name for path in shared.path.iterdir()] == ["a"]


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_of_two_processes_that_write_at_once_one_is_there_whole(place_of, kind):
    shared = open_storage(place_of(kind))
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, shared.url, letter]) for letter in "AB"
    ]
    seen = set()
    try:
        while any(writer.poll() is None for writer in writers) or not seen:
            if text := shared.read_text("same"):
                seen.add(text)
            assert set(shared.names()) <= {"same"}
    finally:
        assert [writer.wait(60) for writer in writers] == [0, 0]
    assert seen <= {"A" * 300_000, "B" * 300_000}
    assert shared.names() == ["same"]


def test_of_two_threads_that_write_at_once_one_is_there_whole(shared):
    def write(letter):
        for _ in range(5):
            shared.write_text("same", letter * 1000)

    threads = [threading.Thread(target=write, args=[letter]) for letter in "AB"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared.read_text("same") in {"A" * 1000, "B" * 1000}
    assert shared.names() == ["same"]


def test_a_folder_inside_is_another_place(place_of):
    for kind in KINDS:
        place = place_of(kind)
        inside = open_storage(place, "runs/one")
        inside.write_text("a", kind)
        assert open_storage(inside.url).read_text("a") == kind
        assert open_storage(open_storage(place, "runs").url, "one").names() == ["a"]


def test_a_file_url_is_a_path(tmp_path):
    folder = tmp_path / "a b"
    shared = open_storage(folder.as_uri(), "c")
    shared.write_text("a", "x")
    assert (folder / "c" / "a").read_text() == "x"
    assert shared.url == str(folder / "c")
    with pytest.raises(StoreError, match=r"file://host/x: it names another machine .* Write file:"):
        open_storage("file://host/x")


def test_a_path_that_cannot_be_a_folder_is_told(tmp_path):
    (tmp_path / "file").write_text("x")
    shared = open_storage(tmp_path / "file")
    for asking in (shared.names, lambda: shared.read_text("a")):
        with pytest.raises(StoreError, match=r"Cannot read .*file.*: Not a directory\. Check"):
            asking()
    with pytest.raises(StoreError, match="Cannot write"):
        shared.write_text("a", "x")
    with pytest.raises(StoreError, match="Cannot write"):
        shared.clear()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nowhere://x/y", r"nowhere:// is not a scheme that .* Use a path, or a URL"),
        ("two::s3://x/y", r"two::s3:// is not a scheme"),
        ("s3://b/run?nonsense=1", r"s3://b/run: Unexpected query parameter .*'nonsense'\. Check"),
        ("memory://", "a whole store, and a run deletes its folder when it is done. Name a folder"),
    ],
)
def test_a_url_that_leads_nowhere_is_told(url, said):
    with pytest.raises(StoreError, match=said):
        open_storage(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://KEY:hush/hush@bucket/run?x=y",
        "s3://KEY:hush@bucket/run?nonsense=hush",
        "s3://KEY:hush?hush@bucket/run",
        "nowhere://user:hush@x/y?token=hush",
        "nowhere://x/y?token=hush",
        "two::s3://user:hush@x/y",
        "abfs://container:hush@account.dfs.core.windows.net/x?nonsense=hush",
        "s3://b/run?hush",
    ],
)
def test_a_password_is_never_shown(url):
    with pytest.raises(StoreError) as caught:
        open_storage(url)
    assert "hush" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_store_with_a_password_shows_itself_without(s3):
    url = f"s3://tests:h%2Fush@tests/run?endpoint_override={s3}&scheme=http"
    shared = open_storage(url)
    assert shared.url == url
    assert shared.shown == "s3://…@tests/run"
    with pytest.raises(FileNotFoundError) as caught, shared.reading("a"):
        pass
    assert caught.value.filename == "s3://…@tests/run/a"


def test_a_missing_bucket_is_told(s3):
    query = f"?endpoint_override={s3}&scheme=http"
    with pytest.raises(StoreError, match=r"s3://none/run: there is no bucket 'none'\. Create it"):
        open_storage(f"s3://none/run{query}")
    with pytest.raises(StoreError, match=r"s3://tests: it is a whole store"):
        open_storage(f"s3://tests{query}")


def test_missing_rights_are_told(far, s3):
    far.write_text("a", "x")
    request(s3, "POST", "/moto-api/reset-auth", "0")
    try:
        asked = [
            lambda: far.write_text("a", "y"),
            lambda: far.read_text("a"),
            lambda: far.exists("a"),
            lambda: far.delete("a"),
            far.names,
            far.clear,
        ]
        for asking in asked:
            with pytest.raises(StoreError, match=r"Cannot \w+ s3://tests/run-.* Check the URL"):
                asking()
    finally:
        request(s3, "POST", "/moto-api/reset-auth", "inf")
    assert far.read_text("a") == "x"


def test_a_file_that_vanishes_while_it_is_read_is_told(far):
    with far.writing("a") as path:
        path.write_bytes(bytes(3 * READ_AHEAD))
    with far.reading("a") as file:
        assert file.read(10) == bytes(10)
        far.delete("a")
        assert file.read(10) == bytes(10)
        with pytest.raises(StoreError, match=r"Cannot read s3://tests/run-\d+/a: "):
            file.read(2 * READ_AHEAD)


class Broken(fsspec.implementations.memory.MemoryFileSystem):
    """A store whose network is gone, told in its library's own words."""

    protocol = "broken"

    class Gone(Exception):
        pass

    def _open(self, *asked, **options):
        raise Broken.Gone("the line is dead")

    info = _open


def test_a_store_that_does_not_answer_is_told(tmp_path, monkeypatch):
    fsspec.register_implementation("broken", Broken, clobber=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared = open_storage("broken://tests/run")
    asked = [
        lambda: shared.write_text("a", "y"),
        lambda: shared.read_text("a"),
        lambda: shared.exists("a"),
        lambda: shared.delete("a"),
        shared.names,
    ]
    for asking in asked:
        with pytest.raises(StoreError, match=r"Cannot \w+ broken://tests.*: the line is dead\. Ch"):
            asking()
    assert temporaries() == set()


def test_no_temporary_folder_is_told(place_of, tmp_path, monkeypatch):
    shared = open_storage(place_of("memory"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(StoreError, match=r"Cannot create a temporary folder: .* Set TMPDIR"):
        shared.write_text("a", "x")


class Unsteady(fsspec.implementations.memory.MemoryFileSystem):
    """A store that refuses to replace a file, and whose network fails in some moves."""

    protocol = "unsteady"
    failing: ClassVar[set[int]] = set()  # numbers of moves, counted from 1
    moves = 0

    def mv(self, path1, path2, **options):
        type(self).moves += 1
        if self.moves in self.failing:
            raise ConnectionError("the line is dead")
        if self.exists(path2):
            raise FileExistsError(path2)
        super().mv(path1, path2, **options)


@pytest.fixture
def unsteady(monkeypatch):
    fsspec.register_implementation("unsteady", Unsteady, clobber=True)
    storage = open_storage(f"unsteady://tests/run-{next(_NUMBER)}")
    storage.write_text("a", "committed")
    monkeypatch.setattr(Unsteady, "moves", 0)
    return storage


def test_a_store_that_refuses_to_replace_files_gets_the_new_one(unsteady):
    unsteady.write_text("a", "new")
    assert unsteady.read_text("a") == "new"
    assert len(Unsteady().ls(unsteady._root)) == 1


@pytest.mark.parametrize("failing", [{1, 2}, {1, 3}, {1}, {2}, {3}, {1, 2, 3}])
def test_a_move_that_fails_loses_no_committed_file(unsteady, monkeypatch, failing):
    monkeypatch.setattr(Unsteady, "failing", failing)
    try:
        unsteady.write_text("a", "new")
        assert unsteady.read_text("a") == "new"
    except StoreError:
        assert unsteady.read_text("a") == "committed"
    assert len(Unsteady().ls(unsteady._root)) == 1
