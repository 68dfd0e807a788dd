-- Snapshots, what outlives a machine, policies and quotas.

-- +goose Up
ALTER TABLE projects ADD COLUMN quotas TEXT NOT NULL DEFAULT '{}';

ALTER TABLE sandboxes ADD COLUMN epoch INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sandboxes ADD COLUMN policy TEXT NOT NULL DEFAULT
  '{"idle":{"after":21600000000000,"action":"suspend"},"on_expiry":"delete","on_crash":"none","checkpoint":300000000000}';
ALTER TABLE sandboxes ADD COLUMN touched_at INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sandboxes ADD COLUMN image TEXT NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN image_at INTEGER;
ALTER TABLE sandboxes ADD COLUMN base TEXT NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN source TEXT NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN parent TEXT NOT NULL DEFAULT '';
-- What quotas sum: resources again, so that an index holds them and a sum reads no row.
ALTER TABLE sandboxes ADD COLUMN milli_cpu INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sandboxes ADD COLUMN memory_mib INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sandboxes ADD COLUMN disk_mib INTEGER NOT NULL DEFAULT 0;
-- Before this version only a create brought machines up, and nothing raised the
-- generation of a sandbox that went on running.
UPDATE sandboxes SET touched_at = updated_at, epoch = CASE WHEN state = 'running' THEN generation ELSE 0 END,
  milli_cpu = json_extract(resources, '$.milli_cpu'), memory_mib = json_extract(resources, '$.memory_mib'),
  disk_mib = json_extract(resources, '$.disk_mib');

CREATE INDEX sandboxes_usage ON sandboxes(project, state, milli_cpu, memory_mib, disk_mib) WHERE state <> 'deleted';
CREATE INDEX sandboxes_by_image ON sandboxes(image) WHERE image <> '';
CREATE INDEX sandboxes_by_base ON sandboxes(base) WHERE base <> '';
CREATE INDEX sandboxes_by_source ON sandboxes(source) WHERE source <> '' AND state = 'creating';

ALTER TABLE operations ADD COLUMN snapshot TEXT NOT NULL DEFAULT '';
ALTER TABLE operations ADD COLUMN children TEXT;
ALTER TABLE operations ADD COLUMN from_state TEXT NOT NULL DEFAULT '';

ALTER TABLE sessions ADD COLUMN parent TEXT NOT NULL DEFAULT '';
ALTER TABLE sessions ADD COLUMN parent_offset INTEGER NOT NULL DEFAULT 0;

-- The sandbox is no reference: a named snapshot outlives its row.
CREATE TABLE snapshots (
  id         TEXT PRIMARY KEY,
  project    TEXT NOT NULL REFERENCES projects(id),
  sandbox    TEXT NOT NULL,
  name       TEXT NOT NULL,
  kind       TEXT NOT NULL,
  purpose    TEXT NOT NULL,
  state      TEXT NOT NULL,
  parent     TEXT NOT NULL,
  template   TEXT NOT NULL,
  digest     TEXT NOT NULL,
  driver     TEXT NOT NULL,
  resources  TEXT NOT NULL,
  needs      TEXT NOT NULL,
  size_bytes INTEGER NOT NULL,
  operation  TEXT NOT NULL,
  replaces   TEXT NOT NULL, -- of a checkpoint: the sandbox's image when it began
  created_at INTEGER NOT NULL,
  taken_at   INTEGER
) STRICT;
CREATE INDEX snapshots_by_age ON snapshots(project, created_at, id);
CREATE INDEX snapshots_by_age_all ON snapshots(created_at, id);
CREATE INDEX snapshots_by_sandbox ON snapshots(sandbox, created_at, id);
CREATE INDEX snapshots_by_state ON snapshots(state, purpose);
CREATE INDEX snapshots_by_parent ON snapshots(parent) WHERE parent <> '';
CREATE INDEX snapshots_by_template ON snapshots(project, digest);
CREATE INDEX snapshots_usage ON snapshots(project, purpose, state, size_bytes);
