package chaos

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
)

// patience is how long anything may take before it counts as lost. It is long:
// two cores, six workers, and a daemon that is mostly dead.
const patience = 4 * time.Minute

// refusal is a definite answer that is no success.
type refusal struct {
	status int
	api.Problem
}

func (r *refusal) String() string {
	return fmt.Sprintf("%d %s %s: %s", r.status, r.Class, r.Code, r.Detail)
}

// errNoAnswer is what a call ends in that got none for long.
var errNoAnswer = errors.New("no definite answer came")

// ask sends one lifecycle request with one idempotency key until a definite
// answer comes. Now and then it throws an answer away and asks again, as a
// client does whose connection was cut: the second answer must be the first's.
// retried tells that the daemon may have seen it before.
func (w *world) ask(rnd *rand.Rand, method, path string, body, out any) (r *refusal, retried bool, err error) {
	key := fmt.Sprintf("%016x%016x", rnd.Uint64(), rnd.Uint64())
	deaf := rnd.IntN(20) == 0
	for end := time.Now().Add(patience); time.Now().Before(end); retried = true {
		answer, r, err := w.once(method, path, key, body)
		switch {
		case err != nil:
			time.Sleep(time.Duration(30+rnd.IntN(100)) * time.Millisecond)
			continue
		case r != nil && r.Retryable && r.status == http.StatusServiceUnavailable:
			w.rep.count("refusals", fmt.Sprintf("%s/%s, asked again", r.Class, r.Code))
			time.Sleep(time.Duration(100+rnd.IntN(200)) * time.Millisecond)
			continue
		case r != nil:
			return r, retried, nil
		case deaf:
			deaf = false
			w.rep.count("checks", "answers thrown away and asked for again")
			continue
		}
		if out != nil {
			if err := json.Unmarshal(answer, out); err != nil {
				return nil, retried, fmt.Errorf("the answer to %s %s is not understood: %w: %.300s", method, path, err, answer)
			}
		}
		return nil, retried, nil
	}
	return nil, retried, fmt.Errorf("%s %s: %w", method, path, errNoAnswer)
}

// once sends a request once.
func (w *world) once(method, path, key string, body any) ([]byte, *refusal, error) {
	var r io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, nil, err
		}
		r = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(context.Background(), method, w.d.URL+path, r)
	if err != nil {
		return nil, nil, err
	}
	req.Header.Set("Authorization", "Bearer "+w.d.Key)
	req.Header.Set("Accept", "application/json, application/problem+json")
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if method != http.MethodGet {
		req.Header.Set("Idempotency-Key", key)
	}
	resp, err := w.plain.Do(req)
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, nil, err
	}
	if resp.StatusCode/100 == 2 {
		return b, nil, nil
	}
	p := &refusal{status: resp.StatusCode}
	if err := json.Unmarshal(b, &p.Problem); err != nil || p.Class == "" || p.Code == "" {
		return nil, nil, fmt.Errorf("%s %s: %d without a problem: %.300s", method, path, resp.StatusCode, b)
	}
	return nil, p, nil
}

// wait waits for an operation's end.
func (w *world) wait(id string) (api.Operation, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	op, err := w.c.Wait(ctx, id, nil)
	if op.State == api.OperationSucceeded || op.State == api.OperationFailed {
		return op, nil
	}
	return op, fmt.Errorf("the operation %s (%s of %s) does not end; it is %s, step %q, delay %+v: %w", id, op.Verb, op.Sandbox, op.State, op.Step, op.Delay, err)
}

// row reads a sandbox.
func (w *world) row(id string) (api.Sandbox, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return w.c.Sandbox(ctx, id)
}

// exec runs a command inside as root until it has an answer; it is one that may
// run twice.
func (w *world) exec(id string, args ...string) (string, error) {
	var last error
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), patience/2)
		r, err := w.c.Exec(ctx, id, api.ExecRequest{Args: args, User: "root"})
		cancel()
		var e *client.Error
		switch {
		case err == nil && r.Exited && r.Exit != nil && r.Exit.Code == 0:
			return string(r.Stdout), nil
		case err == nil:
			last = fmt.Errorf("exec %q: exited %v, lost %v, exit %+v, stderr %.300s", args, r.Exited, r.Lost, r.Exit, r.Stderr)
			if r.Exited && r.Exit != nil && r.Exit.Reason == "exited" || r.Lost {
				return string(r.Stdout), last
			}
		case errors.As(err, &e) && e.Code == "session_expired":
			last = err // the clock jumped before its command was started
		case errors.As(err, &e) && !e.Retryable:
			return "", err
		default:
			last = err
		}
	}
	return "", fmt.Errorf("no answer for long: %w", last)
}
