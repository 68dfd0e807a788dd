package house

import (
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// A log is read by people who may not see what runs in sandboxes: no command
// line, environment, input, output or secret is written to one. These are the
// names under which such things are known in this code, as attributes and as
// fields. An end's Detail is one of them: a guest's last words stand in it.
var (
	unloggedKeys = []string{
		"arg", "args", "argv", "body", "cmd", "command", "console", "detail", "env", "environ", "environment", "header", "headers", "input", "output",
		"password", "process", "query", "secret", "stderr", "stdin", "stdout", "token",
	}
	unloggedFields = []string{
		"Args", "Argv", "Authorization", "Body", "Cmd", "Command", "Config", "Console", "Data", "Detail", "Env", "Environ", "Header", "Input", "Output",
		"Password", "Process", "RawQuery", "RequestURI", "Secret", "Stderr", "Stdin", "Stdout", "Token",
	}
	logMethod = regexp.MustCompile(`^(Debug|Info|Warn|Error)(Context)?$|^Log(Attrs)?$|^With$|^log(Err|Error)$`)
	logger    = regexp.MustCompile(`(?i)(^|\.)(s?log|logger)$`)
)

// TestLogs looks at every call that logs. It goes by names, so it can be
// deceived; it is there for what is written in haste.
func TestLogs(t *testing.T) {
	calls := 0
	for _, f := range sources(t) {
		if f.test || f.generated {
			continue
		}
		n, bad := logFaults(t, f.name, f.text)
		calls += n
		for _, b := range bad {
			t.Errorf("%s: what a sandbox runs, says or knows is in no log: %s", f.name, b)
		}
	}
	if calls < 30 {
		t.Errorf("found only %d calls that log: the search is broken", calls)
	}
}

// logFaults counts the calls in a file that log and lists those that may not
// log what they log.
func logFaults(t *testing.T, name, text string) (calls int, bad []string) {
	t.Helper()
	files := token.NewFileSet()
	tree, err := parser.ParseFile(files, name, text, 0)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(tree, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok || !logs(call) {
			return true
		}
		calls++
		for _, arg := range call.Args {
			if what := unlogged(arg); what != "" {
				bad = append(bad, "line "+strconv.Itoa(files.Position(call.Pos()).Line)+" has "+what)
			}
		}
		return true
	})
	return calls, bad
}

func logs(call *ast.CallExpr) bool {
	f, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || !logMethod.MatchString(f.Sel.Name) {
		return false
	}
	return strings.HasPrefix(f.Sel.Name, "log") || logger.MatchString(dotted(f.X))
}

// dotted writes an expression like a.b.c; calls and the like end it.
func dotted(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return dotted(e.X) + "." + e.Sel.Name
	case *ast.CallExpr:
		return dotted(e.Fun)
	}
	return ""
}

func unlogged(arg ast.Expr) (what string) {
	ast.Inspect(arg, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.BasicLit:
			if s, err := strconv.Unquote(n.Value); err == nil && n.Kind == token.STRING && slices.Contains(unloggedKeys, strings.ToLower(s)) {
				what = "the attribute " + n.Value
			}
		case *ast.SelectorExpr:
			if slices.Contains(unloggedFields, n.Sel.Name) {
				what = dotted(n)
			}
		}
		return true
	})
	return what
}

func TestLogsBites(t *testing.T) {
	for line, want := range map[string]int{
		`log.Info("x", "command", v)`:                             1,
		`n.o.Log.Error("x", "why", end.Detail)`:                   1,
		`slog.Info("x", slog.String("env", v))`:                   1,
		`c.log.WarnContext(ctx, "x", "v", fmt.Sprint(s.Process))`: 1,
		`c.logErr(ctx, "x", err, "stdin", b)`:                     1,
		`l := o.Log.With("token", t)`:                             1,
		`n.o.Log.Error("the command ended", "sandbox", id)`:       0,
		`fmt.Println("command", s.Env)`:                           0,
		`math.Log(x.Data)`:                                        0,
	} {
		calls, bad := logFaults(t, "x.go", "package x\nfunc f() {\n"+line+"\n}\n")
		if len(bad) != want || want > 0 && calls != 1 {
			t.Errorf("%s: %d calls, %v", line, calls, bad)
		}
	}
}
