"""Judges what hooks.py counted: every operation of the contract has answered
2xx (the WebSockets: 101, and the host's drain, asked for here), and nothing answered 500.

Arguments: the contract and the counts. Environment as for hooks.py.
"""

import base64
import http.client
import json
import os
import sys
import urllib.parse

import requests
import yaml


def upgrade(path):
    """The status of a WebSocket handshake."""
    url = urllib.parse.urlsplit(os.environ["CLOCHE_URL"])
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    conn = kind(url.netloc, timeout=30)
    conn.request("GET", path, headers={
        "Authorization": f"Bearer {os.environ['CLOCHE_API_KEY']}", "Connection": "Upgrade", "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(),
    })
    status = conn.getresponse().status
    conn.close()
    return str(status)


def sockets():
    """Handshakes of the two WebSockets: the status of each."""
    os.environ.setdefault("FUZZ_COUNTS", os.devnull)
    import hooks

    box, _ = hooks.sandbox()
    try:
        path = f"/v1/sandboxes/{box}"
        ses = hooks.session(box, ["/bin/cat"], stdin=True)
        server = ["python3", "-m", "http.server", "8123", "--bind", "127.0.0.1"]
        hooks.start(box, hooks.session(box, server))
        check = "import socket,time\nfor _ in range(100):\n try: socket.create_connection(('127.0.0.1',8123)); break\n except OSError: time.sleep(.1)\n"
        hooks.api("POST", f"{path}/exec", [200], json={"args": ["python3", "-c", check]})
        return {"openPty": upgrade(f"{path}/sessions/{ses}/pty"), "openTunnel": upgrade(f"{path}/ports/8123/tunnel")}
    finally:
        requests.delete(os.environ["CLOCHE_URL"].rstrip("/") + path, headers=dict(hooks.http.headers), timeout=60)


def drain():
    """The status of a drain, which takes the machines of all that there is and so comes last."""
    url = os.environ["CLOCHE_URL"].rstrip("/")
    headers = {"Authorization": f"Bearer {os.environ['CLOCHE_API_KEY']}"}
    return str(requests.post(url + "/v1/host/drain", json={"within_seconds": 30}, headers=headers, timeout=60).status_code)


def main(contract, counted):
    with open(contract, encoding="utf-8") as f:
        paths = yaml.safe_load(f)["paths"]
    with open(counted, encoding="utf-8") as f:
        counts = json.load(f)
    handshakes = sockets()
    handshakes["drainHost"] = drain()
    bad = 0
    for path, item in paths.items():
        for method, op in item.items():
            if method == "parameters":
                continue
            name = op["operationId"]
            got = counts.get(name, {})
            if name in handshakes:
                got[handshakes[name]] = got.get(handshakes[name], 0) + 1
            ok = any(s.startswith("2") or s == "101" and name in handshakes for s in got) and "500" not in got
            bad += not ok
            told = " ".join(f"{s}×{n}" for s, n in sorted(got.items()))
            print(f"{'ok  ' if ok else 'FAIL'} {name:18} {method.upper():6} {path}: {told or 'never asked'}")
    print(f"{bad} operations without a 2xx or with a 500")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
