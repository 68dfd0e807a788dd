-- Times are nanoseconds since 1970 UTC; JSON columns hold internal/sandbox's
-- own encoding. No output of commands is ever stored here.

-- +goose Up
CREATE TABLE projects (
  id         TEXT PRIMARY KEY,
  name       TEXT NOT NULL UNIQUE,
  created_at INTEGER NOT NULL
) STRICT;

CREATE TABLE keys (
  id         TEXT PRIMARY KEY,
  project    TEXT NOT NULL REFERENCES projects(id),
  name       TEXT NOT NULL,
  role       TEXT NOT NULL,
  hash       BLOB NOT NULL,
  created_at INTEGER NOT NULL,
  revoked_at INTEGER
) STRICT;
CREATE INDEX keys_by_project ON keys(project, created_at);

CREATE TABLE templates (
  project    TEXT NOT NULL REFERENCES projects(id),
  digest     TEXT NOT NULL,
  config     TEXT NOT NULL,
  size_bytes INTEGER NOT NULL,
  source     TEXT NOT NULL,
  created_at INTEGER NOT NULL,
  PRIMARY KEY (project, digest)
) STRICT;
CREATE INDEX templates_by_digest ON templates(digest);

CREATE TABLE releases (
  project    TEXT NOT NULL,
  name       TEXT NOT NULL,
  digest     TEXT NOT NULL,
  updated_at INTEGER NOT NULL,
  PRIMARY KEY (project, name),
  FOREIGN KEY (project, digest) REFERENCES templates(project, digest) ON DELETE CASCADE
) STRICT;
CREATE INDEX releases_by_digest ON releases(project, digest);

CREATE TABLE sandboxes (
  id         TEXT PRIMARY KEY,
  project    TEXT NOT NULL REFERENCES projects(id),
  template   TEXT NOT NULL,
  digest     TEXT NOT NULL,
  driver     TEXT NOT NULL,
  state      TEXT NOT NULL,
  generation INTEGER NOT NULL,
  labels     TEXT NOT NULL,
  env        TEXT NOT NULL,
  resources  TEXT NOT NULL,
  created_at INTEGER NOT NULL,
  updated_at INTEGER NOT NULL,
  expires_at INTEGER,
  ended      TEXT,
  operation  TEXT NOT NULL
) STRICT;
CREATE INDEX sandboxes_by_age ON sandboxes(project, created_at, id);
CREATE INDEX sandboxes_by_age_all ON sandboxes(created_at, id);
CREATE INDEX sandboxes_by_template ON sandboxes(project, digest);
CREATE INDEX sandboxes_by_state ON sandboxes(state, updated_at);
CREATE INDEX sandboxes_by_expiry ON sandboxes(expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE operations (
  id          TEXT PRIMARY KEY,
  project     TEXT NOT NULL REFERENCES projects(id),
  verb        TEXT NOT NULL,
  sandbox     TEXT NOT NULL,
  template    TEXT NOT NULL,
  state       TEXT NOT NULL,
  step        TEXT NOT NULL,
  delay       TEXT,
  error       TEXT,
  key_id      TEXT NOT NULL,
  generation  INTEGER NOT NULL,
  lease_until INTEGER,
  input       TEXT,
  created_at  INTEGER NOT NULL,
  started_at  INTEGER,
  ended_at    INTEGER
) STRICT;
CREATE INDEX operations_by_age ON operations(project, created_at, id);
CREATE INDEX operations_by_age_all ON operations(created_at, id);
CREATE INDEX operations_by_sandbox ON operations(sandbox, created_at, id);
CREATE INDEX operations_unfinished ON operations(created_at, id) WHERE ended_at IS NULL;
CREATE INDEX operations_ended ON operations(ended_at) WHERE ended_at IS NOT NULL;

CREATE TABLE sessions (
  id         TEXT PRIMARY KEY,
  project    TEXT NOT NULL REFERENCES projects(id),
  sandbox    TEXT NOT NULL REFERENCES sandboxes(id) ON DELETE CASCADE,
  process    TEXT NOT NULL,
  generation INTEGER NOT NULL,
  key_id     TEXT NOT NULL,
  created_at INTEGER NOT NULL
) STRICT;
CREATE INDEX sessions_by_age ON sessions(sandbox, created_at, id);

CREATE TABLE events (
  seq       INTEGER PRIMARY KEY AUTOINCREMENT,
  project   TEXT NOT NULL,
  at        INTEGER NOT NULL,
  type      TEXT NOT NULL,
  sandbox   TEXT NOT NULL,
  operation TEXT NOT NULL,
  data      TEXT
) STRICT;
CREATE INDEX events_by_project ON events(project, seq);
CREATE INDEX events_by_time ON events(at);

CREATE TABLE idempotency (
  project    TEXT NOT NULL,
  kind       TEXT NOT NULL,
  key        TEXT NOT NULL,
  request    BLOB NOT NULL,
  subject    TEXT NOT NULL,
  operation  TEXT NOT NULL,
  created_at INTEGER NOT NULL,
  PRIMARY KEY (project, kind, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX idempotency_by_time ON idempotency(created_at);
