package sandbox

// Caller is who asks: an API key that was verified, with its project and
// role. It is a value of its own, so that control and the faces need no
// credential to talk about one.
type Caller struct {
	KeyID   string `json:"key"`
	Project string `json:"project"`
	Role    Role   `json:"role"`
}

// System is Cloche itself.
var System = Caller{KeyID: SystemKey, Role: RoleAdmin}

// Action is something a role may or may not do.
type Action string

// The actions.
const (
	ActSee       Action = "see"        // metadata: sandboxes, operations, sessions' identities, templates, events
	ActChange    Action = "change"     // create, delete and change sandboxes
	ActData      Action = "data"       // run commands; read output and files; reach ports; see environments
	ActTemplate  Action = "template"   // import, tag and delete templates
	ActBuildHost Action = "build_host" // build from the host's own package sources
	ActKeys      Action = "keys"       // create, list and revoke keys
)

// Actions lists every action.
var Actions = []Action{ActSee, ActChange, ActData, ActTemplate, ActBuildHost, ActKeys}

// permits is the only place that knows what a role may do.
var permits = map[Role]map[Action]bool{
	RoleAdmin:   {ActSee: true, ActChange: true, ActData: true, ActTemplate: true, ActBuildHost: true, ActKeys: true},
	RoleProject: {ActSee: true, ActChange: true, ActData: true, ActTemplate: true},
	RoleRead:    {ActSee: true},
}

// Valid tells whether r is a role.
func (r Role) Valid() bool { return permits[r] != nil }

// May tells whether the caller's role permits a.
func (c Caller) May(a Action) bool { return permits[c.Role][a] }

// Can returns nil where May is true and the Denied error (code "forbidden")
// where it is not.
func (c Caller) Can(a Action) error {
	if c.May(a) {
		return nil
	}
	e := Errorf(Denied, "forbidden", "a key with the role %q may not do this (%s)", c.Role, a)
	for _, r := range []Role{RoleProject, RoleAdmin} {
		if permits[r][a] {
			return e.WithHint("use a key with the role %q", r)
		}
	}
	return e
}

// Scope is the project to which the caller's look-ups are confined; "" is any.
func (c Caller) Scope() string {
	if c.Role == RoleAdmin {
		return ""
	}
	return c.Project
}
