package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
)

func newSecret(a *app) *cobra.Command {
	cmd := group("secret", "Manage secrets that only the egress gateway sees")
	list := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List secrets; their values can't be read", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			all, err := c.Secrets(cmd.Context())
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(api.SecretList{Items: append([]api.Secret{}, all...)})
			}
			var rows [][]string
			for _, s := range all {
				source := "-"
				if s.Source != nil {
					source = string(s.Source.Kind)
				}
				rows = append(rows, []string{s.Name, strconv.FormatInt(s.Version, 10), strings.Join(s.Hosts, ","), source, ago(s.UpdatedAt)})
			}
			return a.table([]string{"NAME", "VERSION", "HOSTS", "SOURCE", "CHANGED"}, rows)
		},
	}
	remove := &cobra.Command{
		Use: "rm SECRET…", Aliases: []string{"delete"}, Short: "Delete secrets; what they would be injected into fails", Args: between(1, -1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			return a.each(args, func(name string) error { return c.DeleteSecret(cmd.Context(), name) })
		},
	}
	cmd.AddCommand(newSecretSet(a), list, remove)
	return cmd
}

// secretFlags say what a new secret is.
type secretFlags struct {
	file                     string
	hosts, scopes            []string
	tokenURL, clientID, kind string
}

func newSecretSet(a *app) *cobra.Command {
	var f secretFlags
	cmd := &cobra.Command{
		Use: "set [flags] SECRET", Short: "Make a secret, or give it another value", Args: exactly(1),
		Long: `Make a secret, or give the one of that name another value, which sandboxes use within a second. The value comes from
standard input or from --file, never from an argument; one newline at its end is left out. It can't be read again. A new secret names the hosts
that get it, which can't be changed.

With --token-url the value is a client secret or refresh token, and what is injected are the tokens that it is exchanged for.`,
		Example: `  cloche secret set --host api.example.com API_KEY <key.txt`,
		RunE: func(cmd *cobra.Command, args []string) error {
			value, err := a.secretValue(f.file)
			if err != nil {
				return err
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			s, err := f.put(cmd.Context(), c, args[0], value)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(s)
			}
			_, err = fmt.Fprintf(a.out, "%s %d\n", s.Name, s.Version)
			return err
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&f.file, "file", "-", "read the value from this file")
	fs.StringArrayVar(&f.hosts, "host", nil, "a host that gets it, by its exact name (repeatable)")
	fs.StringVar(&f.tokenURL, "token-url", "", "where the value is exchanged for tokens (OAuth)")
	fs.StringVar(&f.clientID, "client-id", "", "the client's id there")
	fs.StringVar(&f.kind, "grant", "client_credentials", "how: client_credentials or refresh_token")
	fs.StringArrayVar(&f.scopes, "scope", nil, "a scope of the tokens (repeatable)")
	return cmd
}

// secretValue reads a value. Typed into a terminal it would stay on the screen.
func (a *app) secretValue(path string) (string, error) {
	if path == "-" && isTerminal(a.in) {
		return "", &usageError{text: "the value comes from standard input, which is a terminal", hint: "pipe it in, or use --file"}
	}
	f, err := a.input(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	const most = 64 << 10 // more than the daemon takes
	b, err := io.ReadAll(io.LimitReader(f, most))
	if err != nil {
		return "", err
	}
	value := strings.TrimSuffix(strings.TrimSuffix(string(b), "\n"), "\r")
	if value == "" {
		return "", usage("the value is empty")
	}
	return value, nil
}

// put makes or rotates a secret.
func (f *secretFlags) put(ctx context.Context, c *client.Client, name, value string) (api.Secret, error) {
	is, err := c.Secret(ctx, name)
	if client.IsClass(err, api.ClassNotFound) {
		return f.create(ctx, c, name, value)
	}
	if err != nil {
		return is, err
	}
	hosts := slices.Sorted(slices.Values(f.hosts))
	if len(hosts) > 0 && !slices.Equal(hosts, slices.Sorted(slices.Values(is.Hosts))) || f.tokenURL != "" && (is.Source == nil || is.Source.TokenUrl != f.tokenURL) {
		return is, &usageError{
			text: fmt.Sprintf("the secret %s is there, with other hosts or another source (%s)", name, strings.Join(is.Hosts, ", ")),
			hint: "those can't be changed: delete it first, or give another one a name of its own",
		}
	}
	return c.RotateSecret(ctx, name, api.RotateSecretRequest{Value: value})
}

func (f *secretFlags) create(ctx context.Context, c *client.Client, name, value string) (api.Secret, error) {
	if len(f.hosts) == 0 {
		return api.Secret{}, &usageError{text: fmt.Sprintf("there is no secret %s, and a new one names its hosts", name), hint: "use --host"}
	}
	req := api.CreateSecretRequest{Name: name, Hosts: f.hosts, Value: value}
	if f.tokenURL != "" {
		req.Source = &api.SecretSource{Kind: api.SecretSourceKind(f.kind), TokenUrl: f.tokenURL, ClientId: f.clientID, Scopes: f.scopes}
	} else if f.clientID != "" || len(f.scopes) > 0 {
		return api.Secret{}, usage("--client-id and --scope need --token-url")
	}
	return c.CreateSecret(ctx, req)
}
