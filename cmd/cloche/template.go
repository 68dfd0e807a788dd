package main

import (
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"

	"github.com/spf13/cobra"

	"cloche.dev/cloche/api"
)

func newTemplate(a *app) *cobra.Command {
	cmd := group("template", "Make and manage templates")
	cmd.AddCommand(newTemplateBuild(a), newTemplateList(a), newTemplateInspect(a), newTemplateRemove(a), newTemplateTag(a))
	return cmd
}

// group makes a command that only holds others.
func group(name, short string) *cobra.Command {
	return &cobra.Command{
		Use: name, Short: short,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usage("%s has no command %q", cmd.CommandPath(), args[0])
			}
			return cmd.Help()
		},
	}
}

// baseRequest is what makes the default template: as sandbox.BaseTemplate.
func baseRequest() api.BuildRequest {
	return api.BuildRequest{
		Debian: api.DebianSource{
			Packages: []string{"bash", "ca-certificates", "curl", "git", "python3", "sudo"},
			Users:    []api.TemplateUser{{Name: "user", Sudo: true}},
		},
		Config: api.RuntimeConfig{User: "user", Workdir: "/home/user", Command: []string{"/bin/bash"}, Env: api.Env{"LANG": "C.UTF-8"}},
	}
}

var releaseName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,63}(:[A-Za-z0-9_][A-Za-z0-9._-]{0,63})?$`)

// release completes "name" to "name:latest".
func release(s string) (string, error) {
	if !releaseName.MatchString(s) {
		return "", usage("%q is no release: it must be like name or name:tag, in lower case", s)
	}
	if !strings.Contains(s, ":") {
		s += ":latest"
	}
	return s, nil
}

type buildFlags struct {
	tar, debian, user, workdir string
	packages, users, sudoers   []string
	env, command               []string
}

func newTemplateBuild(a *app) *cobra.Command {
	var f buildFlags
	cmd := &cobra.Command{
		Use:     "build [flags] NAME[:TAG]",
		Aliases: []string{"import"},
		Short:   "Make a template and point a release to it",
		Long: `Make a template from the tar of a root filesystem (--tar; what docker export gives), which may be compressed with gzip
or zstd, or from Debian packages on the daemon's host (--debian, --package), and point the release NAME:TAG to it.

` + "`cloche template build base`" + ` without further flags makes the default template: Debian with python3, git, curl, bash, sudo
and a user with passwordless sudo.`,
		Example: "  cloche template build base\n  cloche template build web --debian bookworm --package nginx --package curl\n  docker export box | cloche template build box --tar -",
		Args:    exactly(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			name, err := release(args[0])
			if err != nil {
				return err
			}
			cfg, err := f.config()
			if err != nil {
				return err
			}
			if cmd.CalledAs() == "import" && f.tar == "" {
				f.tar = "-"
			}
			if f.tar != "" {
				if f.debian != "" || len(f.packages)+len(f.users)+len(f.sudoers) > 0 {
					return usage("--tar goes with neither --debian nor packages nor users")
				}
				return a.importTar(cmd, f.tar, cfg, name)
			}
			debian := f.debian != "" || len(f.packages) > 0
			req := f.request(cfg)
			switch {
			case !debian && (strings.TrimSuffix(name, ":latest") != "base" || len(f.users)+len(f.sudoers) > 0):
				return usage("say what it is made from: --tar FILE, or --debian SUITE with --package NAME")
			case !debian:
				req = overlay(baseRequest(), cfg)
			}
			req.Release = name
			return a.build(cmd, req)
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&f.tar, "tar", "", "the tar of a root filesystem; - is standard input")
	fs.StringVar(&f.debian, "debian", "", "Debian `SUITE` to build from, e.g. bookworm")
	fs.StringArrayVar(&f.packages, "package", nil, "a Debian package beside the minimal system (repeatable)")
	fs.StringArrayVar(&f.users, "add-user", nil, "make a user (repeatable)")
	fs.StringArrayVar(&f.sudoers, "add-sudoer", nil, "make a user with passwordless sudo (repeatable; needs the package sudo)")
	fs.StringVarP(&f.user, "user", "u", "", "default user of commands")
	fs.StringVarP(&f.workdir, "workdir", "w", "", "default working directory of commands")
	fs.StringArrayVarP(&f.env, "env", "e", nil, "default environment `NAME=VALUE` (repeatable)")
	fs.StringArrayVar(&f.command, "command", nil, "default command, one argument each (repeatable)")
	return cmd
}

func (f *buildFlags) config() (api.RuntimeConfig, error) {
	env, err := pairs(f.env, "--env", true)
	if len(env) == 0 {
		env = nil
	}
	return api.RuntimeConfig{User: f.user, Workdir: f.workdir, Command: f.command, Env: env}, err
}

func (f *buildFlags) request(cfg api.RuntimeConfig) api.BuildRequest {
	req := api.BuildRequest{Debian: api.DebianSource{Suite: f.debian, Packages: f.packages}, Config: cfg}
	for _, u := range f.users {
		req.Debian.Users = append(req.Debian.Users, api.TemplateUser{Name: u})
	}
	for _, u := range f.sudoers {
		req.Debian.Users = append(req.Debian.Users, api.TemplateUser{Name: u, Sudo: true})
	}
	return req
}

// overlay lets what the user named win over the default template's.
func overlay(req api.BuildRequest, cfg api.RuntimeConfig) api.BuildRequest {
	if cfg.User != "" {
		req.Config.User = cfg.User
	}
	if cfg.Workdir != "" {
		req.Config.Workdir = cfg.Workdir
	}
	if len(cfg.Command) > 0 {
		req.Config.Command = cfg.Command
	}
	for k, v := range cfg.Env {
		req.Config.Env[k] = v
	}
	return req
}

func (a *app) importTar(cmd *cobra.Command, file string, cfg api.RuntimeConfig, name string) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	var in io.Reader = a.in
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return err
		}
		defer f.Close()
		in = f
	}
	p := a.begin("importing " + name)
	t, err := c.ImportTemplate(cmd.Context(), &counted{r: in, p: p, what: "importing " + name}, cfg, name)
	p.end()
	if err != nil {
		return err
	}
	return a.made(t)
}

func (a *app) build(cmd *cobra.Command, req api.BuildRequest) error {
	ctx := cmd.Context()
	c, err := a.client()
	if err != nil {
		return err
	}
	p := a.begin("building " + req.Release)
	op, err := c.BuildTemplate(ctx, req)
	if err == nil {
		op, err = c.Wait(ctx, op.Id, p.operation("building "+req.Release))
	}
	p.end()
	if err != nil {
		return err
	}
	t, err := c.Template(ctx, op.Template)
	if err != nil {
		return err
	}
	return a.made(t)
}

// made says what template there is now.
func (a *app) made(t api.Template) error {
	if a.json {
		return a.printJSON(t)
	}
	_, err := fmt.Fprintf(a.out, "%s  %s  %s\n", t.Digest, strings.Join(t.Releases, ","), amount(t.SizeBytes))
	return err
}

func newTemplateList(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List templates", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			list, err := c.Templates(cmd.Context())
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(api.TemplateList{Items: append([]api.Template{}, list...)})
			}
			var rows [][]string
			for _, t := range list {
				names := t.Releases
				if len(names) == 0 {
					names = []string{"-"}
				}
				for _, n := range names {
					rows = append(rows, []string{n, short(t.Digest), amount(t.SizeBytes), t.Source, age(t.CreatedAt)})
				}
			}
			return a.table([]string{"RELEASE", "DIGEST", "SIZE", "SOURCE", "AGE"}, rows)
		},
	}
}

// short is the beginning of a digest, for tables.
func short(digest string) string { return digest[:min(len(digest), len("sha256:")+12)] }

func newTemplateInspect(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "inspect TEMPLATE", Short: "Show a template as JSON", Args: exactly(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			t, err := c.Template(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.printJSON(t)
		},
	}
}

func newTemplateRemove(a *app) *cobra.Command {
	var untag bool
	cmd := &cobra.Command{
		Use: "rm [flags] TEMPLATE…", Aliases: []string{"delete"}, Short: "Delete templates and their releases", Args: between(1, -1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			return a.each(args, func(ref string) error {
				if !untag {
					return c.DeleteTemplate(cmd.Context(), ref)
				}
				name, err := release(ref)
				if err != nil {
					return err
				}
				return c.Untag(cmd.Context(), name)
			})
		},
	}
	cmd.Flags().BoolVar(&untag, "untag", false, "remove the release only; the template stays")
	return cmd
}

func newTemplateTag(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "tag TEMPLATE NAME[:TAG]", Short: "Point a release to a template", Args: exactly(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			name, err := release(args[1])
			if err != nil {
				return err
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			r, err := c.Tag(cmd.Context(), args[0], name)
			if err == nil && a.json {
				err = a.printJSON(r)
			}
			return err
		},
	}
}
