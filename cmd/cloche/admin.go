package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
)

func newOperation(a *app) *cobra.Command {
	cmd := group("op", "Look at operations")
	var sandbox string
	var most int
	list := &cobra.Command{
		Use: "ls [flags]", Aliases: []string{"list"}, Short: "List operations, newest first", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx := cmd.Context()
			c, err := a.client()
			if err != nil {
				return err
			}
			f := client.OperationFilter{Most: most}
			if sandbox != "" {
				if f.Sandbox, err = a.sandbox(ctx, c, sandbox); err != nil {
					return err
				}
			}
			ops, err := c.Operations(ctx, f)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(api.OperationList{Items: append([]api.Operation{}, ops...)})
			}
			return a.printOperations(ops)
		},
	}
	list.Flags().StringVar(&sandbox, "sandbox", "", "only those on a sandbox")
	list.Flags().IntVarP(&most, "limit", "n", 50, "at most so many; 0 is all")
	get := &cobra.Command{
		Use: "get OPERATION", Short: "Show an operation as JSON", Args: exactly(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			op, err := c.Operation(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.printJSON(op)
		},
	}
	wait := &cobra.Command{
		Use: "wait OPERATION", Short: "Wait for an operation to end; fails as it failed", Args: exactly(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			p := a.begin("waiting for " + args[0])
			op, err := c.Wait(cmd.Context(), args[0], p.operation(args[0]))
			p.end()
			if op.EndedAt.IsZero() || !a.json {
				return err
			}
			if printed := a.printJSON(op); err == nil {
				err = printed
			}
			return err
		},
	}
	cmd.AddCommand(list, get, wait)
	return cmd
}

func (a *app) printOperations(ops []api.Operation) error {
	var rows [][]string
	for _, op := range ops {
		what, state := op.Sandbox, string(op.State)
		if what == "" {
			what = orDash(short(op.Template))
		}
		detail := op.Step
		switch {
		case op.Error != nil:
			detail = op.Error.Code + ": " + op.Error.Message
		case op.Delay != nil:
			state, detail = state+" (delayed)", op.Delay.Reason
		}
		took := "-"
		if !op.EndedAt.IsZero() {
			took = op.EndedAt.Sub(op.CreatedAt).Round(1e6).String()
		}
		rows = append(rows, []string{op.Id, op.Verb, what, state, age(op.CreatedAt), took, orDash(detail)})
	}
	return a.table([]string{"ID", "VERB", "WHAT", "STATE", "AGE", "TOOK", "DETAIL"}, rows)
}

func newKey(a *app) *cobra.Command {
	cmd := group("key", "Make and revoke API keys")
	var role, project string
	create := &cobra.Command{
		Use: "create [flags] NAME", Short: "Make an API key and print its secret, this once", Args: exactly(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !api.Role(role).Valid() {
				return usage("--role must be admin, project or read, not %q", role)
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			k, err := c.CreateKey(cmd.Context(), api.CreateKeyRequest{Name: args[0], Role: api.Role(role), Project: project})
			if err != nil {
				return err
			}
			if k.Secret == "" {
				return &client.Error{
					Class: api.ClassConflict, Code: "secret_lost", Message: fmt.Sprintf("the key %s was made, but its secret was lost with the connection", k.Key.Id),
					Hint: "revoke it (`cloche key revoke " + k.Key.Id + "`) and make another",
				}
			}
			if a.json {
				return a.printJSON(k)
			}
			a.note("key %s (%s); its secret is shown this once:", k.Key.Id, k.Key.Role)
			_, err = fmt.Fprintln(a.out, k.Secret)
			return err
		},
	}
	create.Flags().StringVar(&role, "role", "project", "what it may do: admin, project or read")
	create.Flags().StringVar(&project, "project", "", "id of its project (default: this key's)")
	list := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List API keys", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			keys, err := c.Keys(cmd.Context())
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(api.KeyList{Items: append([]api.Key{}, keys...)})
			}
			var rows [][]string
			for _, k := range keys {
				state := "valid"
				if !k.RevokedAt.IsZero() {
					state = "revoked " + age(k.RevokedAt) + " ago"
				}
				rows = append(rows, []string{k.Id, k.Name, string(k.Role), k.Project, age(k.CreatedAt), state})
			}
			return a.table([]string{"ID", "NAME", "ROLE", "PROJECT", "AGE", "STATE"}, rows)
		},
	}
	revoke := &cobra.Command{
		Use: "revoke KEY…", Short: "Make API keys good for nothing", Args: between(1, -1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			return a.each(args, func(id string) error { return c.RevokeKey(cmd.Context(), id) })
		},
	}
	cmd.AddCommand(create, list, revoke)
	return cmd
}

// executable is this program, for what it runs of itself.
func executable() []string {
	self, err := os.Executable()
	if err != nil || strings.HasSuffix(self, " (deleted)") {
		return nil
	}
	return []string{self}
}
