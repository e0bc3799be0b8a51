"""The contract against a real S3 server, a folder and memory, and what can be wrong with a server."""

import asyncio
import json
import logging
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from kvist_connector.errors import ConfigError, StorageFull, TierError
from kvist_connector.testing.chunk_store import ChunkStoreSuite, key, read_all
from kvist_connector.testing.services import ACCESS_KEY, BUCKET, SECRET_KEY, S3Process
from kvist_connector.tiers.base import ChunkStore, Read
from kvist_connector.tiers.folder_store import FolderStore
from kvist_connector.tiers.object_backend import Bucket, open_backend
from kvist_connector.tiers.object_store import ObjectStore

pytestmark = pytest.mark.timeout(120)
SCOPE = b"model-state-16-b"


def opened(threads, server: S3Process, **settings) -> ObjectStore:
    options = {"endpoint": server.endpoint, "credentials_file": server.credentials_file} | settings
    return ObjectStore(open_backend(Bucket(server.url, **options)), server.url, threads)


class TestS3(ChunkStoreSuite):
    @pytest.fixture
    async def store(self, s3_server, threads) -> ChunkStore:
        return opened(threads, await s3_server())

    async def test_of_replacements_at_once_one_is_made(self, store: ChunkStore) -> None:
        """This server looks and replaces in two steps, so two at once may pass: here they come one by one."""
        await store.put_if_absent(key(1), [b"head"])
        assert [await store.replace(key(1), b"head", [body]) for body in (b"one", b"other")] == [True, False]
        assert await read_all(store, key(1), 3) == (3, b"one")


class TestFolder(ChunkStoreSuite):
    @pytest.fixture
    def store(self, tmp_path, threads) -> ChunkStore:
        backend = open_backend(Bucket((tmp_path / "shared" / "chunks").as_uri()))
        return FolderStore(backend, "folder", threads)


class TestMemory(ChunkStoreSuite):
    @pytest.fixture
    def store(self, threads) -> ChunkStore:
        return ObjectStore(MemoryStore(), "memory", threads)


@pytest.mark.parametrize("size", [200_000, 12_000_000])
async def test_two_agents_store_a_chunk_once(s3_server, threads, size):
    """Large bodies too, of which the server refuses the second one before it has read it."""
    server = await s3_server()
    one, other = opened(threads, server), opened(threads, server)
    contents = [bytes([number]) * size for number in range(8)]
    stores = [one, other] * 4
    results = await asyncio.gather(
        *(store.put_if_absent(SCOPE + key(1), [data]) for store, data in zip(stores, contents, strict=True))
    )
    assert sum(results) == 1
    assert await read_all(other, SCOPE + key(1), size) == (size, contents[results.index(True)])


@pytest.mark.parametrize("there", [True, False])
async def test_a_put_that_is_cut_off_is_no_failure_when_another_agent_was_first(threads, tmp_path, there):
    """Servers that refuse early close the connection amid the body: their answer may never arrive."""
    sent = []

    async def handle(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"PUT"):
            sent.append(head)
            writer.transport.abort()
            return
        found = b"200 OK" if sent and there else b"404 Not Found"
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: 7\r\nConnection: close\r\n" % found)
        writer.write(b'Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\nETag: "1"\r\n\r\n')
        writer.close()
        await writer.wait_closed()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    store = opened(threads, S3Process(tmp_path, port=listening.sockets[0].getsockname()[1]))
    async with listening:
        if there:
            assert not await store.put_if_absent(key(1), [bytes(12_000_000)])
        else:
            with pytest.raises(TierError, match="PUT"):
                await store.put_if_absent(key(1), [bytes(12_000_000)])
    assert all(b"if-none-match: *" in head.lower() for head in sent)


async def test_objects_of_one_model_lie_under_one_prefix(s3_server, threads, tmp_path):
    server = await s3_server()
    await opened(threads, server).put_if_absent(SCOPE + key(1), [b"x"])
    (path,) = (path for path in server.folder.rglob("*") if path.name == key(1).hex())
    assert path.relative_to(server.folder / BUCKET).parts[:-1] == ("tests", SCOPE.hex())


async def test_wrong_credentials_are_told_and_a_corrected_file_is_read(s3_server, threads):
    server = await s3_server()
    server.write_credentials(ACCESS_KEY, "wrong")
    with pytest.raises(TierError, match=r"access denied: check object_store\.credentials_file"):
        await opened(threads, server).get(Read(key(1), [memoryview(bytearray(1))]))
    server.write_credentials(ACCESS_KEY, SECRET_KEY)
    assert await opened(threads, server).sizes([key(1)]) == [None]


async def test_a_bucket_that_is_not_there_and_a_dead_server_are_told(s3_server, threads):
    server = await s3_server()
    store = ObjectStore(
        open_backend(
            Bucket("s3://nothere", endpoint=server.endpoint, credentials_file=server.credentials_file)
        ),
        "s3://nothere",
        threads,
    )
    with pytest.raises(TierError, match="nothere"):
        await store.put_if_absent(key(1), [b"x"])
    await server.kill()
    with pytest.raises(TierError, match="s3://"):
        await opened(threads, server).get(Read(key(1), [memoryview(bytearray(1))]))
    (answer,) = await opened(threads, server).sizes([key(1)])
    assert isinstance(answer, TierError)


async def test_a_server_without_conditional_put_is_used_with_a_warning_once(threads, tmp_path, caplog):
    objects: dict[str, bytes] = {}

    async def handle(request: web.Request) -> web.Response:
        if request.method == "PUT":
            if "If-None-Match" in request.headers:
                return web.Response(status=501, text="<Error><Code>NotImplemented</Code></Error>")
            objects[request.path] = await request.read()
            return web.Response(headers={"ETag": '"1"'})
        if request.path not in objects:
            return web.Response(status=404)
        headers = {"ETag": '"1"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
        return web.Response(body=objects[request.path], headers=headers)

    application = web.Application(client_max_size=2**24)
    application.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server = S3Process(tmp_path, port=runner.addresses[0][1])
    store = opened(threads, server)
    with caplog.at_level(logging.WARNING):
        for number in (1, 2):
            assert await store.put_if_absent(key(number), [b"data"])
            assert not await store.put_if_absent(key(number), [b"other"])
    assert sum("no conditional put" in record.message for record in caplog.records) == 1
    assert len(objects) == 2
    await runner.cleanup()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no section"),
        ("[default]\naws_access_key_id = a\n", "has no aws_secret_access_key"),
        ("aws_secret_access_key = hush", "is no AWS credentials file"),
        ("[default]\nhush", "is no AWS credentials file"),
        ("[a]\nx = 1\n[b]\ny = 2\n", "has no section"),
    ],
)
def test_a_credentials_file_that_does_not_serve_is_refused(tmp_path, text, message):
    path = tmp_path / "credentials"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        open_backend(Bucket("s3://bucket", credentials_file=path))
    assert "hush" not in str(caught.value)


def test_an_address_that_cannot_be_used_is_refused():
    with pytest.raises(ConfigError, match=r"object_store\.url"):
        open_backend(Bucket("ftp://somewhere/else"))


@pytest.mark.parametrize("scheme", ["az", "azure", "abfs", "adl"])
def test_azure_addresses_and_their_settings_file_are_accepted(tmp_path, scheme):
    path = tmp_path / "credentials"
    path.write_text("[default]\nazure_storage_account_name = acc\nazure_storage_account_key = a2V5\n")
    backend = open_backend(Bucket(f"{scheme}://box/some/prefix", credentials_file=path))
    assert isinstance(backend, AzureStore)
    assert backend.prefix == "some/prefix"
    assert backend.config["container_name"] == "box"


def test_google_addresses_and_their_service_account_are_accepted(tmp_path):
    path = tmp_path / "account.json"
    key_pem = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {"type": "service_account", "private_key": key_pem.decode(), "private_key_id": "1"}
    account |= {"client_email": "a@b.invalid", "client_id": "1", "token_uri": "https://token.invalid"}
    path.write_text(json.dumps(account))
    backend = open_backend(Bucket("gs://box/some/prefix", credentials_file=path))
    assert isinstance(backend, GCSStore)
    assert backend.prefix == "some/prefix"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"gs://box cannot be used.*private_key"):
        open_backend(Bucket("gs://box", credentials_file=path))


@asynccontextmanager
async def refused(threads, status, text=""):
    """A store over a server that has nothing and takes nothing."""

    async def refuse(request: web.Request) -> web.Response:
        if request.method == "HEAD":
            return web.Response(status=404)
        return web.Response(status=status, text=text, content_type="application/xml")

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", refuse)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    backend = S3Store(
        "bucket",
        endpoint=f"http://127.0.0.1:{port}",
        access_key_id="a",
        secret_access_key="b",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    yield ObjectStore(backend, "s3://bucket", threads)
    await runner.cleanup()


async def test_clocks_that_differ_are_told_as_such(threads):
    text = "<Error><Code>RequestTimeTooSkewed</Code><Message>too large</Message></Error>"
    async with refused(threads, 403, text) as store:
        with pytest.raises(TierError, match="clock"):
            await store.get(Read(key(1), [memoryview(bytearray(1))]))


async def test_a_server_whose_disk_is_full_is_full_and_not_broken(threads):
    async with refused(threads, 507) as store:
        with pytest.raises(StorageFull, match="507"):
            await store.put_if_absent(key(1), [b"x"])
        with pytest.raises(TierError):
            await store.get(Read(key(1), [memoryview(bytearray(1))]))


async def test_credentials_that_vanished_are_told(s3_server, threads):
    server = await s3_server()
    store = opened(threads, server)
    server.credentials_file.unlink()
    with pytest.raises(TierError, match=r"credentials_file: .* cannot be read"):
        await store.get(Read(key(1), [memoryview(bytearray(1))]))
    server.write_credentials(ACCESS_KEY, SECRET_KEY)
    assert await store.get(Read(key(1), [memoryview(bytearray(1))])) is None
