package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
)

func newEvents(a *app) *cobra.Command {
	var follow bool
	var after int64
	cmd := &cobra.Command{
		Use: "events [flags]", Short: "Show what changed, oldest first", Args: noArgs,
		Long: `Show the events that are kept (a week's). With --follow it shows what happens from now on, or what happened behind
--after and then what happens, until Ctrl-C; a daemon that goes away is waited for, and none is lost. Each has a
sequence, which --after takes.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if after < 0 {
				return usage("--after can't be negative")
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			if !follow {
				return a.listEvents(cmd.Context(), c, after)
			}
			o := client.EventOptions{
				Interrupted: func(err error) { a.note("cloche: %s; waiting for the daemon to come back", line(err.Error())) },
				Resumed:     func() { a.note("cloche: the daemon is back") },
			}
			if cmd.Flags().Changed("after") {
				o.After = &after
			}
			return a.followEvents(cmd.Context(), c, o)
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on until Ctrl-C")
	cmd.Flags().Int64Var(&after, "after", 0, "begin behind this sequence; 0 is the oldest that is kept")
	return cmd
}

// eventPage is how many events are asked for at once.
const eventPage = 1000

func (a *app) listEvents(ctx context.Context, c *client.Client, after int64) error {
	for {
		page, err := c.EventPage(ctx, &after, eventPage, 0)
		if err != nil {
			return err
		}
		if page.Gap != nil {
			if err := a.printGap(page.Gap); err != nil {
				return err
			}
		}
		for i := range page.Items {
			if err := a.printEvent(&page.Items[i]); err != nil {
				return err
			}
		}
		if len(page.Items) == 0 || page.NextAfter <= after {
			return nil
		}
		after = page.NextAfter
	}
}

func (a *app) followEvents(ctx context.Context, c *client.Client, o client.EventOptions) error {
	ctx, release := interruptible(ctx)
	defer release()
	s := c.Events(o)
	defer s.Close()
	for {
		h, err := s.Next(ctx)
		switch {
		case ctx.Err() != nil:
			return nil // Ctrl-C is how it ends
		case err != nil:
			return err
		case h.Gap != nil:
			err = a.printGap(h.Gap)
		default:
			err = a.printEvent(h.Event)
		}
		if err != nil {
			return err
		}
	}
}

func (a *app) printGap(gap *api.EventsGap) error {
	if a.json {
		return a.printLine(map[string]*api.EventsGap{"gap": gap})
	}
	a.note("cloche: events from %d up to %d are no longer kept", gap.After+1, gap.Oldest-1)
	return nil
}

func (a *app) printEvent(e *api.Event) error {
	if a.json {
		return a.printLine(e)
	}
	about := e.Sandbox
	if about == "" {
		about = orDash(e.Operation)
	}
	_, err := fmt.Fprintf(a.out, "%d  %s  %-16s  %s  %s\n", e.Seq, e.At.Local().Format(time.DateTime), line(e.Type), line(about), eventText(e))
	return err
}

// maxEventText bounds what is printed of data that has no words of its own.
const maxEventText = 200

// eventText says what changed in one line.
func eventText(e *api.Event) string {
	var moved struct {
		From string   `json:"from"`
		To   string   `json:"to"`
		End  *api.End `json:"end"`
	}
	if json.Unmarshal(e.Data, &moved) == nil && moved.To != "" {
		text := moved.To
		if moved.From != "" {
			text = moved.From + " → " + moved.To
		}
		if moved.End != nil {
			text += strings.TrimRight(" ("+moved.End.Reason+": "+moved.End.Detail, ": ") + ")"
		}
		return line(text)
	}
	text := []rune(line(string(e.Data)))
	if len(text) > maxEventText {
		text = append(text[:maxEventText], '…')
	}
	return string(text)
}
