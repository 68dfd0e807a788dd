"""Hooks that give schemathesis something real to ask about.

Random ids belong to nothing, so without help every answer is 404. These hooks
make a few real things first (a sandbox, sessions, a template's release, a key)
and put them into the cases that schemathesis means to be valid: the first ones
of each operation become a request that must succeed, later ones keep their
random query and body beside real ids. Cases that are meant to be wrong are
left alone. What was answered is counted and judged by verdict.py.

Environment: CLOCHE_URL, CLOCHE_API_KEY (admin), CLOCHE_TEMPLATE (a release or
digest that exists) and FUZZ_COUNTS (where the counts go).
"""

import atexit
import collections
import io
import json
import os
import tarfile
import threading
import time
import urllib.parse

import requests
import schemathesis
from schemathesis.transport.serialization import Binary

URL = os.environ["CLOCHE_URL"].rstrip("/")
KEY = os.environ["CLOCHE_API_KEY"]
TEMPLATE = os.environ["CLOCHE_TEMPLATE"]
GOOD = 2  # how many cases of each operation become one that must succeed

http = requests.Session()
http.headers["Authorization"] = f"Bearer {KEY}"
lock = threading.Lock()
counts = collections.defaultdict(collections.Counter)
given = collections.Counter()


def api(method, path, want, **kw):
    answer = http.request(method, URL + path, timeout=120, **kw)
    if answer.status_code not in want:
        raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text[:500]}")
    return answer.json() if answer.content else None


def wait(operation):
    while operation["state"] not in ("succeeded", "failed"):
        operation = api("GET", f"/v1/operations/{operation['id']}?wait_seconds=30", [200])
    if operation["state"] != "succeeded":
        raise RuntimeError(f"an operation failed: {operation}")
    return operation


def sandbox():
    body = {"template": TEMPLATE, "resources": {"milli_cpu": 500, "memory_mib": 256, "disk_mib": 256}}
    made = api("POST", "/v1/sandboxes", [202], json=body)
    wait(made["operation"])
    return made["sandbox"]["id"], made["operation"]["id"]


def session(box, args, **kw):
    made = api("POST", f"/v1/sandboxes/{box}/sessions", [201], json={"args": args, **kw})
    return made["session"]["id"]


def start(box, ses):
    api("POST", f"/v1/sandboxes/{box}/sessions/{ses}/attach", [200], headers={"Accept": "application/json"})


def ended(box):
    """A session that has run and ended: its streams end."""
    ses = session(box, ["/bin/true"])
    http.post(f"{URL}/v1/sandboxes/{box}/sessions/{ses}/attach", timeout=60).close()
    while api("GET", f"/v1/sandboxes/{box}/sessions/{ses}", [200])["state"] == "running":
        time.sleep(0.05)
    return ses


def reading(box):
    """A session that reads its input until it is closed."""
    ses = session(box, ["/bin/cat"], stdin=True, tty={"rows": 24, "cols": 80})
    start(box, ses)
    return ses


def put(box, path, data):
    api("PUT", f"/v1/sandboxes/{box}/files", [200], params={"path": path, "parents": "true"}, data=data,
        headers={"Content-Type": "application/octet-stream"})


def tar():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as t:
        info = tarfile.TarInfo("etc/motd")
        info.size = 6
        t.addfile(info, io.BytesIO(b"hello\n"))
    return out.getvalue()


class World:
    """What exists, made once, when first asked for."""

    def __init__(self):
        self.box, self.op = sandbox()
        self.spare, _ = sandbox()
        self.gone, _ = sandbox()
        wait(api("DELETE", f"/v1/sandboxes/{self.gone}", [202]))
        self.life, _ = sandbox()
        made = api("POST", f"/v1/sandboxes/{self.life}/snapshots", [202], json={"name": "fuzz"})
        wait(made["operation"])
        self.snapshot = made["snapshot"]["id"]
        self.ended = ended(self.box)
        self.reading = reading(self.box)
        put(self.box, "/tmp/fuzz/file", b"0123456789")


world_lock = threading.Lock()
world_made = None


def world():
    global world_made
    with world_lock:
        if world_made is None:
            world_made = World()
        return world_made


PROFILE = {"default": "deny", "rules": [{"action": "allow", "hosts": ["*.example.com"], "methods": ["GET"]}]}
SECRET = {"hosts": ["api.example.com"], "value": "not a secret"}


def unique(prefix):
    return f"fuzz-{prefix}{time.monotonic_ns()}"


def fresh_profile():
    return api("POST", "/v1/egress/profiles", [201], json={"name": unique("p"), **PROFILE})["name"]


def fresh_secret():
    return api("POST", "/v1/secrets", [201], json={"name": unique("s"), **SECRET})["name"]


def fresh_key():
    made = api("POST", "/v1/keys", [201], json={"name": "fuzz", "role": "read"})
    return made["key"]["id"]


def fresh_template():
    name = f"fuzz-t{time.monotonic_ns()}:1"
    api("POST", "/v1/templates", [201], params={"release": name, "env": f"NAME={name.replace(':', '_')}"}, data=tar(),
        headers={"Content-Type": "application/x-tar"})
    return name


def fresh_release(name="fuzz-release:1"):
    api("PUT", f"/v1/releases/{name}", [200], json={"template": TEMPLATE})
    return name


def fresh_file():
    path = f"/tmp/fuzz/f{time.monotonic_ns()}"
    put(world().box, path, b"x")
    return path


# How a sandbox gets from any quiet state to running, and from there to another.
TO_RUNNING = {"paused": "resume", "suspended": "restore", "stopped": "start", "failed": "start"}
FROM_RUNNING = {"paused": "pause", "suspended": "suspend", "stopped": "stop"}


def life(state):
    """The sandbox that the verbs are asked of, brought to a state."""
    box = world().life

    def now():
        while True:
            sb = api("GET", f"/v1/sandboxes/{box}", [200])
            if not sb.get("operation"):
                return sb["state"]
            api("GET", f"/v1/operations/{sb['operation']}?wait_seconds=30", [200])

    for _ in range(5):
        at = now()
        if at == state:
            return {"sandbox": box}
        verb = TO_RUNNING.get(at) or FROM_RUNNING.get(state)
        if verb is None:
            raise RuntimeError(f"the sandbox of the verbs is {at} and should be {state}")
        wait(api("POST", f"/v1/sandboxes/{box}/{verb}", [202])["operation"])
    raise RuntimeError(f"the sandbox of the verbs can't be brought to {state}")


def fresh_snapshot():
    """A snapshot that no sandbox goes back to: another has taken its place."""
    box = life("running")["sandbox"]
    taken = []
    for _ in range(2):
        taken.append(api("POST", f"/v1/sandboxes/{box}/snapshots", [202], json={"kind": "disk"}))
        wait(taken[-1]["operation"])
    return taken[0]["snapshot"]["id"]


def project():
    return api("GET", "/v1/usage", [200])["project"]


def in_box(**kw):
    return {"sandbox": world().box, **kw}


def on(ses):
    return in_box(session=ses)


# For each operation: path, query and body of a request that must succeed.
good = {
    "getHealth": lambda: ({}, {}, None),
    "getVersion": lambda: ({}, {}, None),
    "listSandboxes": lambda: ({}, {"limit": 5, "state": ["running"]}, None),
    "createSandbox": lambda: ({}, {}, {"template": TEMPLATE, "resources": {"memory_mib": 128}, "ttl_seconds": 30}),
    "getSandbox": lambda: (in_box(), {}, None),
    "updateSandbox": lambda: ({"sandbox": world().spare}, {}, {"labels": {"a": "b"}, "ttl_seconds": None}),
    "deleteSandbox": lambda: ({"sandbox": sandbox()[0]}, {}, None),
    "pauseSandbox": lambda: (life("running"), {}, None),
    "resumeSandbox": lambda: (life("paused"), {}, None),
    "suspendSandbox": lambda: (life("running"), {}, None),
    "restoreSandbox": lambda: (life("suspended"), {}, None),
    "stopSandbox": lambda: (life("running"), {"grace_seconds": 0}, None),
    "startSandbox": lambda: (life("stopped"), {}, None),
    "wakeSandbox": lambda: (life("paused"), {}, None),
    "rollbackSandbox": lambda: (life("running"), {}, {"snapshot": world().snapshot}),
    "forkSandbox": lambda: (life("running"), {}, {"count": 1}),
    "takeSnapshot": lambda: (life("running"), {}, {"name": "good", "kind": "disk"}),
    "listSnapshots": lambda: ({}, {"sandbox": world().life}, None),
    "getSnapshot": lambda: ({"snapshot": world().snapshot}, {}, None),
    "deleteSnapshot": lambda: ({"snapshot": fresh_snapshot()}, {}, None),
    "listEvents": lambda: ({}, {"after": 0, "limit": 5}, None),
    "setSandboxEgress": lambda: ({"sandbox": world().spare}, {}, {"profile": "public"}),
    "listEgressProfiles": lambda: ({}, {}, None),
    "createEgressProfile": lambda: ({}, {}, {"name": unique("p"), **PROFILE}),
    "getEgressProfile": lambda: ({"profile": "packages"}, {}, None),
    "replaceEgressProfile": lambda: ({"profile": fresh_profile()}, {}, {"version": 1, **PROFILE}),
    "deleteEgressProfile": lambda: ({"profile": fresh_profile()}, {}, None),
    "listEgressRecords": lambda: ({}, {"after": 0, "limit": 5}, None),
    "listSecrets": lambda: ({}, {}, None),
    "createSecret": lambda: ({}, {}, {"name": unique("s"), **SECRET}),
    "getSecret": lambda: ({"secret": fresh_secret()}, {}, None),
    "rotateSecret": lambda: ({"secret": fresh_secret()}, {}, {"value": "another value"}),
    "deleteSecret": lambda: ({"secret": fresh_secret()}, {}, None),
    "getUsage": lambda: ({}, {}, None),
    "setQuotas": lambda: ({"project": project()}, {}, {"running": 1000}),
    "createAccessToken": lambda: (in_box(), {}, {"purpose": "files"}),
    "listOperations": lambda: ({}, {"sandbox": world().box}, None),
    "getOperation": lambda: ({"operation": world().op}, {"wait_seconds": 1}, None),
    "listTemplates": lambda: ({}, {}, None),
    "importTemplate": lambda: ({}, {"user": "user"}, tar()),
    "getTemplate": lambda: ({"template": TEMPLATE}, {}, None),
    "deleteTemplate": lambda: ({"template": fresh_template()}, {}, None),
    "buildTemplate": lambda: ({}, {}, {"debian": {"suite": "nosuchsuite"}}),
    "putRelease": lambda: ({"release": "fuzz-release:1"}, {}, {"template": TEMPLATE}),
    "deleteRelease": lambda: ({"release": fresh_release()}, {}, None),
    "listKeys": lambda: ({}, {}, None),
    "createKey": lambda: ({}, {}, {"name": "fuzz", "role": "read"}),
    "revokeKey": lambda: ({"key": fresh_key()}, {}, None),
    "listSessions": lambda: (in_box(), {}, None),
    "createSession": lambda: (in_box(), {}, {"args": ["/bin/true"]}),
    "getSession": lambda: (on(world().ended), {}, None),
    "followSession": lambda: (on(world().ended), {}, None),
    "attachSession": lambda: (on(session(world().box, ["/bin/true"])), {}, None),
    "writeStdin": lambda: (on(world().reading), {}, b"x"),
    "signalSession": lambda: (on(world().reading), {}, {"signal": "SIGCONT"}),
    "resizeSession": lambda: (on(world().reading), {}, {"rows": 30, "cols": 100}),
    "openPty": lambda: (on(world().ended), {}, None),
    "execCommand": lambda: (in_box(), {}, {"args": ["/bin/echo", "hello"]}),
    "readFile": lambda: (in_box(), {"path": "/tmp/fuzz/file"}, None),
    "writeFile": lambda: (in_box(), {"path": "/tmp/fuzz/new"}, b"x"),
    "removeFile": lambda: (in_box(), {"path": fresh_file()}, None),
    "statFile": lambda: (in_box(), {"path": "/tmp"}, None),
    "listFiles": lambda: (in_box(), {"path": "/tmp/fuzz"}, None),
    "makeDirectory": lambda: (in_box(), {}, {"path": f"/tmp/fuzz/d{time.monotonic_ns()}"}),
    "moveFile": lambda: (in_box(), {}, {"from": fresh_file(), "to": f"/tmp/fuzz/m{time.monotonic_ns()}"}),
    "readArchive": lambda: (in_box(), {"path": "/tmp/fuzz"}, None),
    "writeArchive": lambda: (in_box(), {"path": "/tmp/fuzz"}, tar()),
    "openTunnel": lambda: (in_box(port=1), {}, None),
}

# Real ids for the later cases, where the ones above are made anew each time or
# random data could take away what the others need.
later = {
    "deleteSandbox": lambda: {"sandbox": world().gone},
    **{
        verb: lambda: {"sandbox": world().gone}
        for verb in (
            "pauseSandbox", "resumeSandbox", "suspendSandbox", "restoreSandbox", "stopSandbox", "startSandbox", "wakeSandbox",
            "rollbackSandbox", "forkSandbox", "takeSnapshot",
        )
    },
    "updateSandbox": lambda: {"sandbox": world().spare},
    "attachSession": lambda: on(world().ended),
    "signalSession": lambda: on(world().ended),
    "writeStdin": lambda: on(world().ended),
}
random_only = {
    "replaceEgressProfile", "deleteEgressProfile", "rotateSecret", "deleteSecret", "getSecret", "setQuotas", "deleteSnapshot", "deleteTemplate", "deleteRelease", "putRelease", "revokeKey",
}


def tame(name, case):
    """Keeps random requests from doing harm to the run itself."""
    if name == "readArchive":  # of "/" it would have no end that memory here can hold
        case.query["path"] = "/tmp/fuzz"
    if name == "removeFile":
        case.query["path"] = "/tmp/fuzz/none"
    if name == "moveFile" and isinstance(case.body, dict):
        case.body["from"] = "/tmp/fuzz/none"
    if name == "buildTemplate" and isinstance(case.body, dict) and isinstance(case.body.get("debian"), dict):
        case.body["debian"]["suite"] = "nosuchsuite"
    if name == "execCommand" and isinstance(case.body, dict):
        case.body["wait_seconds"] = 5


def protect(name, case):
    """Leaves the template and the sandboxes of the run alone, whatever a case is meant to be."""
    ids = case.path_parameters or {}
    if name == "deleteSandbox" and world_made and ids.get("sandbox") in (world_made.box, world_made.life, world_made.spare):
        case.path_parameters = {**ids, "sandbox": world_made.gone}
    mine = {TEMPLATE, TEMPLATE.removesuffix(":latest"), TEMPLATE.removesuffix(":latest") + ":latest"}
    for field in ("template", "release"):
        if name in ("deleteTemplate", "deleteRelease", "putRelease") and urllib.parse.unquote(str(ids.get(field))) in mine:
            case.path_parameters = {**ids, field: "fuzz-none:1"}


@schemathesis.serializer("application/x-tar")
def raw(_context, value):
    if isinstance(value, Binary):
        return value.data
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


def positive(case):
    return case.meta is None or case.meta.generation.mode.is_positive


@schemathesis.hook
def before_call(context, case, kwargs):
    name = case.operation.definition.raw.get("operationId")
    protect(name, case)
    if name in ("listEvents", "listEgressRecords"):  # a stream of these does not end
        if case.headers is None:
            case.headers = {}
        case.headers["Accept"] = "application/json"  # in place: a case may be about what is missing
        if case.query:
            case.query.pop("wait_seconds", None)
    if name not in good or not positive(case):
        return
    with lock:
        given[name] += 1
        first = given[name] <= GOOD
    if first:
        path, query, body = good[name]()
        case.path_parameters, case.query = dict(path), dict(query)
        case.headers = {k: v for k, v in (case.headers or {}).items() if k.lower() in ("authorization", "accept")}
        if body is not None:
            case.body = Binary(body) if isinstance(body, bytes) else body
        return
    if name not in random_only:
        ids = later[name]() if name in later else good[name]()[0]
        case.path_parameters = {**(case.path_parameters or {}), **ids}
    tame(name, case)


@schemathesis.hook
def after_call(context, case, response):
    name = case.operation.definition.raw.get("operationId")
    with lock:
        counts[name][str(response.status_code)] += 1


@atexit.register
def save():
    with open(os.environ["FUZZ_COUNTS"], "w", encoding="utf-8") as f:
        json.dump(counts, f, indent=1, sort_keys=True)
