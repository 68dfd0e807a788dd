package control

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// fileGuard keeps a template's files from being removed between their making
// and the insert of the row that roots them: while something is being made,
// digests wait in doomed and the last maker removes what still has no row.
type fileGuard struct {
	mu     sync.Mutex
	makers int
	doomed map[string]bool
}

// making brackets the making of files and the insert of their row.
func (c *Control) making(ctx context.Context) (done func()) {
	c.files.mu.Lock()
	defer c.files.mu.Unlock()
	c.files.makers++
	return func() {
		c.files.mu.Lock()
		defer c.files.mu.Unlock()
		c.files.makers--
		// The end of a request must not keep files that nothing roots.
		c.removeDoomed(context.WithoutCancel(ctx))
	}
}

// doom removes the files of those digests that no row has, now or after what
// is being made.
func (c *Control) doom(ctx context.Context, digests ...string) {
	c.files.mu.Lock()
	defer c.files.mu.Unlock()
	for _, digest := range digests {
		c.files.doomed[digest] = true
	}
	c.removeDoomed(context.WithoutCancel(ctx))
}

// collectFiles removes the files of templates that a crash left without a row.
func (c *Control) collectFiles(ctx context.Context) {
	digests, err := c.builder.Digests(ctx)
	if err != nil {
		c.logErr(ctx, "can't list the templates' files", err)
		return
	}
	c.doom(ctx, digests...)
}

func (c *Control) removeDoomed(ctx context.Context) {
	if c.files.makers > 0 {
		return
	}
	for digest := range c.files.doomed {
		has, err := c.store.HasTemplate(ctx, digest)
		if err == nil && !has {
			err = c.builder.Remove(ctx, digest)
		}
		if err != nil {
			c.logErr(ctx, "can't remove a template's files", err, "digest", digest)
			continue // the next removal tries again
		}
		delete(c.files.doomed, digest)
	}
}

// Import reads a root filesystem as a tar and makes it a template of the
// caller's project. Where release ("name:tag") is not "", it points there.
func (c *Control) Import(ctx context.Context, who sandbox.Caller, tar io.Reader, cfg sandbox.RuntimeConfig, release string) (t sandbox.Template, b sandbox.Built, err error) {
	if err := who.Can(sandbox.ActTemplate); err != nil {
		return t, b, err
	}
	if err := validateTarget(cfg, release); err != nil {
		return t, b, err
	}
	defer c.making(ctx)()
	if b, err = c.builder.ImportTar(ctx, tar, cfg); err != nil {
		return t, b, err
	}
	t, err = c.put(ctx, who.Project, b, cfg, "tar", release)
	return t, b, err
}

func validateTarget(cfg sandbox.RuntimeConfig, release string) error {
	if err := ValidateConfig(cfg); err != nil {
		return err
	}
	if release == "" {
		return nil
	}
	return ValidateRelease(release)
}

// put inserts the row of built files.
func (c *Control) put(ctx context.Context, project string, b sandbox.Built, cfg sandbox.RuntimeConfig, source, release string) (sandbox.Template, error) {
	t, err := c.store.PutTemplate(ctx, sandbox.Template{
		Digest: b.Digest, Project: project, Config: cfg, SizeBytes: b.SizeBytes, Source: source, CreatedAt: c.now().UTC(),
	}, release)
	if err != nil {
		// Called between making and its end, which does the removal.
		c.doom(ctx, b.Digest)
		return t, err
	}
	c.bell.ring("")
	return t, nil
}

// Build asks for a template from the host's own package sources.
func (c *Control) Build(ctx context.Context, who sandbox.Caller, req sandbox.BuildRequest, idem sandbox.Idempotency) (op sandbox.Operation, replayed bool, err error) {
	if err := who.Can(sandbox.ActBuildHost); err != nil {
		return op, false, err
	}
	if err := validateTarget(req.Config, req.Release); err != nil {
		return op, false, err
	}
	if err := validateDebian(req.Debian); err != nil {
		return op, false, err
	}
	if idem, err = stamp(idem, req); err != nil {
		return op, false, err
	}
	op = c.newOperation(who, sandbox.VerbBuild)
	if op.Input, err = json.Marshal(req); err != nil {
		return op, false, fmt.Errorf("store a build's request: %w", err)
	}
	op, replayed, err = c.store.CreateOperation(ctx, op, idem)
	if err == nil && !replayed {
		c.begun(op)
	}
	return op, replayed, err
}

// build carries out a build operation. It is safe to do it again: files are
// addressed by content.
func (c *Control) build(ctx context.Context, op sandbox.Operation) error {
	var req sandbox.BuildRequest
	if err := json.Unmarshal(op.Input, &req); err != nil {
		return c.store.EndBuild(ctx, op.ID, "", sandbox.Errorf(sandbox.Internal, "bad_input", "the stored request can't be read: %w", err))
	}
	err := c.builds.take(ctx, func() { c.progress(ctx, op, sandbox.OpAccepted, "", "another template is being built") })
	if err != nil {
		return nil // stopping
	}
	defer c.builds.free()
	defer c.making(ctx)()
	b, err := c.runBuild(ctx, op, req)
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return c.store.EndBuild(ctx, op.ID, "", sandbox.AsError(err))
	}
	t, err := c.put(ctx, op.Project, b, req.Config, "debian:"+req.Debian.Suite, req.Release)
	if err != nil {
		return c.store.EndBuild(ctx, op.ID, "", sandbox.AsError(err))
	}
	return c.store.EndBuild(ctx, op.ID, t.Digest, nil)
}

// runBuild runs the builder and tells its last line of progress each second.
func (c *Control) runBuild(ctx context.Context, op sandbox.Operation, req sandbox.BuildRequest) (sandbox.Built, error) {
	c.progress(ctx, op, sandbox.OpRunning, "building", "")
	var mu sync.Mutex
	var last, told string
	watching, stop := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		c.every(watching, time.Second, func(ctx context.Context) {
			mu.Lock()
			line := last
			mu.Unlock()
			if line != told {
				told = line
				c.progress(ctx, op, sandbox.OpRunning, line, "")
			}
		})
	}()
	build, cancel := context.WithTimeout(ctx, c.o.BuildTimeout)
	b, err := c.builder.BuildDebian(build, req.Debian, req.Config, func(line string) {
		const most = 200
		if len(line) > most {
			line = strings.ToValidUTF8(line[:most], "")
		}
		mu.Lock()
		last = line
		mu.Unlock()
	})
	cancel()
	stop()
	<-watched
	return b, err
}

// Template resolves a name, name:tag or digest in the caller's project.
func (c *Control) Template(ctx context.Context, who sandbox.Caller, ref string) (sandbox.Template, error) {
	if err := c.refers(who, sandbox.ActSee, ref); err != nil {
		return sandbox.Template{}, err
	}
	return c.store.Template(ctx, who.Project, ref)
}

// refers checks the role and the form of a reference.
func (c *Control) refers(who sandbox.Caller, a sandbox.Action, ref string) error {
	if err := who.Can(a); err != nil {
		return err
	}
	return ValidateRef(ref)
}

// Templates lists the templates of the caller's project, newest first.
func (c *Control) Templates(ctx context.Context, who sandbox.Caller) ([]sandbox.Template, error) {
	if err := who.Can(sandbox.ActSee); err != nil {
		return nil, err
	}
	return c.store.Templates(ctx, who.Project)
}

// Tag makes release ("name:tag") point to the template that ref names now.
func (c *Control) Tag(ctx context.Context, who sandbox.Caller, ref, release string) (sandbox.Release, error) {
	if err := c.refers(who, sandbox.ActTemplate, ref); err != nil {
		return sandbox.Release{}, err
	}
	if err := ValidateRelease(release); err != nil {
		return sandbox.Release{}, err
	}
	r, err := c.store.Tag(ctx, who.Project, ref, release)
	c.bell.ring("")
	return r, err
}

// Untag removes a release; its template stays.
func (c *Control) Untag(ctx context.Context, who sandbox.Caller, release string) error {
	if err := who.Can(sandbox.ActTemplate); err != nil {
		return err
	}
	if err := ValidateRelease(release); err != nil {
		return err
	}
	return c.store.Untag(ctx, who.Project, release)
}

// DeleteTemplate removes the template that ref names, with every release that
// points to it. Its files go when no project has it any more.
func (c *Control) DeleteTemplate(ctx context.Context, who sandbox.Caller, ref string) error {
	if err := c.refers(who, sandbox.ActTemplate, ref); err != nil {
		return err
	}
	t, err := c.store.Template(ctx, who.Project, ref)
	if err != nil {
		return err
	}
	last, err := c.store.DeleteTemplate(ctx, who.Project, t.Digest)
	if err != nil {
		return err
	}
	if last {
		c.doom(ctx, t.Digest)
	}
	return nil
}
