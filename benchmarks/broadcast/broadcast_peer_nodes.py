"""One node of a broadcast by somebody else's program: libtorrent, lattica or shardcast. Run by their own interpreter.

Each is driven as its makers mean it, with the settings that were fastest for it in trials. What has to be known before
a download begins (the torrent, the names of the blocks) is there before the clock starts, for all of them.
"""

from __future__ import annotations

import base64
import os
import random
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from wan.lines import content, described, digest, hear, say

PORT = 9000
LIBTORRENT_SETTINGS = {
    "enable_dht": False,
    "enable_lsd": False,
    "enable_natpmp": False,
    "enable_upnp": False,
    "enable_incoming_utp": False,  # TCP: what the others use, and faster in every trial
    "enable_outgoing_utp": False,
    "allow_multiple_connections_per_ip": True,
    "peer_turnover": 0,
    "connection_speed": 200,
    "max_out_request_queue": 2000,
    "request_queue_time": 3,
    "send_buffer_watermark": 4 << 20,
    "send_buffer_watermark_factor": 150,
    "send_buffer_low_watermark": 1 << 20,
    "unchoke_interval": 2,
    "optimistic_unchoke_interval": 4,
    "close_redundant_connections": False,
    "torrent_connect_boost": 100,
}


def file_of(node: dict[str, Any]) -> Path:
    return Path(node["directory"]) / "content.bin"


def serve_digest(read: Any) -> None:
    """Obey until the end: show the digest when asked."""
    while (order := hear()) != "quit":
        if order == "verify":
            say("digest", digest=digest(read()))


# ---- libtorrent ------------------------------------------------------------------------------------------------------


def libtorrent(node: dict[str, Any]) -> None:
    import libtorrent as lt

    own = node["addresses"][node["name"]]
    limits = {"unchoke_slots_limit": node["slots"], "listen_interfaces": f"{own}:{PORT}", "alert_mask": 0x7FFFFFFF}
    session = lt.session({**LIBTORRENT_SETTINGS, **limits})
    path = file_of(node)
    if node["role"] == "origin":
        path.write_bytes(content(node["num_bytes"], node["seed"]))
        files = lt.file_storage()
        lt.add_files(files, str(path))
        torrent = lt.create_torrent(files, node["piece_bytes"], lt.create_torrent.v1_only)
        lt.set_piece_hashes(torrent, str(path.parent))
        encoded = lt.bencode(torrent.generate())
        handle = add_torrent(lt, session, encoded, path, lt.torrent_flags.seed_mode)
        say("ready", torrent=base64.b64encode(encoded).decode())
        hear()
        say("published")
        serve_digest(list)
        return
    encoded = base64.b64decode(node["origin"]["torrent"])
    say("joined")
    hear()
    handle = add_torrent(lt, session, encoded, path, 0)
    for name, address in node["addresses"].items():
        if name == "origin" or name < node["name"]:  # one connection for each pair
            handle.connect_peer((address, PORT))
    while not handle.status().is_finished:
        time.sleep(0.02)
    say("whole")
    handle.flush_cache()
    serve_digest(lambda: [path.read_bytes()])


def add_torrent(lt: Any, session: Any, encoded: bytes, path: Path, flags: int) -> Any:
    wanted = lt.add_torrent_params()
    wanted.ti = lt.torrent_info(lt.bdecode(encoded))
    wanted.save_path = str(path.parent)
    wanted.flags = (wanted.flags | flags) & ~(lt.torrent_flags.auto_managed | lt.torrent_flags.paused)
    return session.add_torrent(wanted)


# ---- lattica ---------------------------------------------------------------------------------------------------------


def lattica(node: dict[str, Any]) -> None:
    from lattica import Lattica

    directory, own = Path(node["directory"]), node["addresses"][node["name"]]
    builder = Lattica.builder().with_listen_addrs([f"/ip4/{own}/tcp/{PORT}"]).with_mdns(False).with_upnp(False)
    builder = builder.with_storage_path(str(directory / "blocks")).with_dht_db_path(str(directory / "dht"))
    builder = builder.with_key_path(str(directory / "key")).with_idle_timeout(600)
    if node["role"] == "origin":
        peer = builder.build()
        whole, size = content(node["num_bytes"], node["seed"]), node["block_bytes"]
        blocks = [peer.put_block(whole[at : at + size]) for at in range(0, len(whole), size)]
        address = f"/ip4/{own}/tcp/{PORT}/p2p/{peer.peer_id()}"
        say("ready", blocks=blocks, address=address)
        hear()
        say("published")
        serve_digest(list)
        os._exit(0)  # its threads do not end by themselves
    peer = builder.with_bootstraps([node["origin"]["address"]]).build()
    while not peer.get_all_peers():
        time.sleep(0.05)
    say("joined", peers=len(peer.get_all_peers()))
    hear()
    names = list(node["origin"]["blocks"])
    order = random.Random(node["name"]).sample(names, len(names))  # shuffled, as Parallax does
    got: dict[str, bytes] = {}

    def fetch(name: str) -> None:
        while name not in got:
            try:
                got[name] = peer.get_block(name, timeout_secs=30)[1]
            except RuntimeError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(node["threads"]) as pool:
        list(pool.map(fetch, order))
    say("whole")
    serve_digest(lambda: [got[name] for name in names])
    os._exit(0)


# ---- shardcast -------------------------------------------------------------------------------------------------------


def shardcast(node: dict[str, Any]) -> None:
    """Origin, then `middles` relays, then clients that draw from the relays: workers are relays and clients."""
    os.environ |= {
        "SHARDCAST_SHARD_SIZE": str(node["shard_bytes"]),
        "SHARDCAST_RETRY_ATTEMPTS": "100000",  # a shard that is not there yet is asked for again after a second
        "SHARDCAST_FAST_RETRY_ATTEMPTS": "100000",
        "SHARDCAST_FAST_RETRY_INTERVAL": "1",
        "SHARDCAST_MAX_CONCURRENT_DOWNLOADS": str(node["downloads"]),  # its servers answer one request at a time ...
        "SHARDCAST_HTTP_TIMEOUT": "10",  # ... and forget the callers beyond the sixth
        "SHARDCAST_HTTP_PORT": str(PORT),
        "SHARDCAST_LOG_LEVEL": "ERROR",
    }
    keep_apart(Path(node["directory"]))
    served = Path(node["directory"]) / "served"
    urls = {name: f"http://{address}:{PORT}" for name, address in node["addresses"].items()}
    middles = sorted(name for name in urls if name != "origin")[: node["middles"]]
    if node["role"] == "origin":
        shardcast_origin(node, served)
    elif node["name"] in middles:
        shardcast_middle(node, served, urls["origin"])
    else:
        shardcast_client(node, [urls[name] for name in middles])
    os._exit(0)  # its threads do not end by themselves


def keep_apart(directory: Path) -> None:
    """It writes next to its own source: give each node a copy of that, as on a machine of its own."""
    import importlib.util
    import shutil

    found = importlib.util.find_spec("shardcast")
    assert found is not None
    assert found.origin is not None
    shutil.copytree(Path(found.origin).parent, directory / "lib" / "shardcast")
    sys.path.insert(0, str(directory / "lib"))


def put_probe(served: Path) -> None:
    """Its clients want this file at every server, to see how fast it is."""
    served.mkdir(exist_ok=True)
    (served / "data1.bin").write_bytes(bytes(1 << 16))


def shardcast_origin(node: dict[str, Any], served: Path) -> None:
    import shardcast as library

    put_probe(served)
    path = file_of(node)
    path.write_bytes(content(node["num_bytes"], node["seed"]))
    library.initialize(str(served), PORT)
    say("ready")
    hear()
    say("published")
    library.broadcast(str(path), node["shard_bytes"])
    serve_digest(list)


def shardcast_middle(node: dict[str, Any], served: Path, origin: str) -> None:
    from shardcast import MiddleNode

    put_probe(served)
    relay = MiddleNode([origin], str(served), PORT, check_interval=1)
    say("joined")
    ended = threading.Event()

    def watch() -> None:
        while "v1" not in relay.processed_versions:
            time.sleep(0.02)
        say("whole")
        ended.set()

    threading.Thread(target=watch, daemon=True).start()
    hear()
    ended.wait()
    serve_digest(lambda: [shard.read_bytes() for shard in sorted((served / "v1").glob("shard_*.bin"))])


def shardcast_client(node: dict[str, Any], servers: list[str]) -> None:
    from shardcast import ClientNode

    client = ClientNode(servers, node["directory"])
    say("joined")
    hear()
    path = str(file_of(node))
    for server in servers:  # one that has not heard of it yet would make the client ask for shards that do not exist
        while "v1" not in listed(server):
            time.sleep(0.1)
    if client.download_version("v1", path) is None:
        say("failed", detail="shardcast gave up")
        return
    say("whole")
    serve_digest(lambda: [Path(path).read_bytes()])


def listed(server: str) -> str:
    """What a relay says it has."""
    try:
        with urllib.request.urlopen(f"{server}/distribution.txt", timeout=10) as answer:
            text: str = answer.read().decode()
    except urllib.error.HTTPError:
        return ""
    return text


def main() -> None:
    node = described()
    {"libtorrent": libtorrent, "lattica": lattica, "shardcast": shardcast}[node["system"]](node)


if __name__ == "__main__":
    main()
