-- Egress profiles, secrets (sealed: no value stands here in clear) and the
-- projects' authorities.

-- +goose Up
ALTER TABLE sandboxes ADD COLUMN egress TEXT NOT NULL DEFAULT '';
ALTER TABLE snapshots ADD COLUMN egress TEXT NOT NULL DEFAULT '';
CREATE INDEX sandboxes_by_egress ON sandboxes(project, egress) WHERE state <> 'deleted';

CREATE TABLE egress_profiles (
  id         TEXT PRIMARY KEY,
  project    TEXT NOT NULL REFERENCES projects(id),
  name       TEXT NOT NULL,
  version    INTEGER NOT NULL,
  content    TEXT NOT NULL, -- rules, default, dry run and limits
  created_at INTEGER NOT NULL,
  updated_at INTEGER NOT NULL,
  UNIQUE (project, name)
) STRICT;

-- Which secrets a profile injects.
CREATE TABLE egress_injects (
  profile TEXT NOT NULL REFERENCES egress_profiles(id) ON DELETE CASCADE,
  secret  TEXT NOT NULL, -- its name; there need not be one
  PRIMARY KEY (profile, secret)
) STRICT, WITHOUT ROWID;

CREATE TABLE secrets (
  id         TEXT PRIMARY KEY,
  project    TEXT NOT NULL REFERENCES projects(id),
  name       TEXT NOT NULL,
  hosts      TEXT NOT NULL,
  version    INTEGER NOT NULL,
  source     TEXT,
  sealed     BLOB NOT NULL,
  created_at INTEGER NOT NULL,
  updated_at INTEGER NOT NULL,
  UNIQUE (project, name)
) STRICT;

CREATE TABLE authorities (
  project TEXT PRIMARY KEY REFERENCES projects(id),
  cert    BLOB NOT NULL,
  key     BLOB NOT NULL -- sealed
) STRICT;

-- One row: the revision of all assignments.
CREATE TABLE egress_revision (
  one INTEGER PRIMARY KEY CHECK (one = 1),
  n   INTEGER NOT NULL
) STRICT;
INSERT INTO egress_revision (one, n) VALUES (1, 1);
