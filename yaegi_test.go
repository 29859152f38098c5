package tap_test

import (
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What Yaegi 0.16.1 breaks without a word, and the Go compiler, `go vet` and the other linters let pass. Imports and calls are
// forbidden in .golangci.yml; what takes a syntax tree or types to see is forbidden here.
const (
	becauseSelect         = "select: its cases are shared by all goroutines, so a message may go to the wrong one; use a mutex, a Cond, plain send and receive, or AfterFunc"
	becauseGenerics       = "generics: wrong code or a load error; write it out for the one type"
	becauseRange          = "range over an integer or a function: load error; count in a for loop"
	becauseBuiltin        = "min, max and clear: load error; write an if or a loop"
	becauseDeferArgument  = "argument of a deferred call: read when the call runs, not at the defer; defer a closure over a fresh local, or pass a variable that is never changed"
	becauseDeferClosure   = "closure called from a defer: dead lock, since a function's frame is locked while its defers run; call a declared function or a method"
	becauseClosureInFrame = "closure in a function that defers something else: dead lock if what is deferred calls it; make it in a function of its own"
	becauseLoopVariable   = "loop variable in a closure: one variable for all rounds; copy it first (k := k)"
	becauseMethodValue    = "value of a compiled method: panics when it is stored; use a closure"
	becausePackageMethod  = "package variable holding a method value: silently no effect where the type is declared further down; use a function"
	becauseReturnFunction = "declared function as a result: panics; return a closure"
	becauseHiddenField    = "unexported field in a marshalled struct: appears in the JSON as \"Xname\"; export it or move it to another struct"
	becauseEmbeddedField  = "embedded field in a marshalled struct: nested instead of flattened; write the fields out"
	becauseMarshaler      = "marshalling method: called only for the direct argument of json.Marshal; marshal plain fields"
	becauseErrorType      = "error type: errors.As and type switches panic or take the wrong case; use errors.New or fmt.Errorf"
	becauseErrorSwitch    = "type switch over an error: takes the wrong case; compare with errors.Is"
	becauseNilAmongOthers = "nil in an assignment to several variables: panics; assign it alone"
	becauseReceiveInto    = "receive into a field or an element: the value is lost; receive into a variable"
	becauseEmbeddedIO     = "two embedded io interfaces: reads silently from the wrong reader; name the fields and write the methods out, on a pointer"
	becauseEmbeddedOwn    = "embedded interface of the plugin: panics; name the field"
	becauseCompiledField  = "plugin type as interface field of a compiled struct literal: panics; assign it through a variable of the interface type first"
)

func TestPlugin_HasNothingThatYaegiBreaks(t *testing.T) {
	names, err := filepath.Glob("*.go")
	require.NoError(t, err)

	fset := token.NewFileSet()
	var files []*ast.File
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(fset, name, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		files = append(files, file)
	}

	require.NotEmpty(t, files)
	for _, found := range findBroken(t, fset, files) {
		t.Errorf("%s (Yaegi 0.16.1)", found)
	}
}

func TestFindBroken_FindsEachConstruct(t *testing.T) {
	cases := []struct {
		code string
		want string
	}{
		{"func f(c chan int) { select { case <-c: } }", becauseSelect},
		{"func f[T any](v T) {}", becauseGenerics},
		{"type box[T any] struct{ v T }", becauseGenerics},
		{"var p atomic.Pointer[string]", becauseGenerics},
		{"var f = sync.OnceValue(func() int { return 1 })", becauseGenerics},
		{"func f(s string, err error) { s, err = \"\", nil; _, _ = s, err }", becauseNilAmongOthers},
		{"type t struct { b bool }; func f(v *t, c chan bool) { v.b = <-c }", becauseReceiveInto},
		{"func f(s []int, c chan int) { s[0] = <-c }", becauseReceiveInto},
		{"func f() { for i := range 3 { _ = i } }", becauseRange},
		{"func f(n int64) { for range n { } }", becauseRange},
		{"var v = min(1, len(os.Args))", becauseBuiltin},
		{"var v = max(1, len(os.Args))", becauseBuiltin},
		{"func f(m map[string]int) { clear(m) }", becauseBuiltin},
		{"func f(v int) { defer g(v); v = 2 }; func g(int) {}", becauseDeferArgument},
		{"func f(v int) { defer func(int) {}(v); v++ }", becauseDeferArgument},
		{"func f() { v := 1; defer g(v); v, w := 2, 3; _ = w }; func g(int) {}", becauseDeferArgument},
		{"func f(v int) { defer g(v); p := &v; *p = 2 }; func g(int) {}", becauseDeferArgument},
		{"func f(v []int) { defer g(v[0]) }; func g(int) {}", becauseDeferArgument},
		{"func f() { g := func() {}; defer g() }", becauseDeferClosure},
		{"func f() { var g = func() {}; defer func() { g() }() }", becauseDeferClosure},
		{"type t struct { g func() }; func f(v *t) { v.g = func() {}; defer h(v) }; func h(v *t) { v.g() }", becauseClosureInFrame},
		{"func f(s []int) { for _, v := range s { go func() { _ = v }() } }", becauseLoopVariable},
		{"func f() { for i := 0; i < 3; i++ { go func() { _ = i }() } }", becauseLoopVariable},
		{"func f(b *bytes.Buffer) { length := b.Len; _ = length() }", becauseMethodValue},
		{"type counter struct{}; func (counter) count() {}; var c counter; var f = c.count", becausePackageMethod},
		{"func f() func() { return g }; func g() {}", becauseReturnFunction},
		{"type r struct { ID string `json:\"id\"`; hidden int }", becauseHiddenField},
		{"type base struct{}; type r struct { ID string `json:\"id\"`; base }", becauseEmbeddedField},
		{"type r struct{}; func (r) MarshalJSON() ([]byte, error) { return nil, nil }", becauseMarshaler},
		{"type failure struct{}; func (failure) Error() string { return `` }", becauseErrorType},
		{"func f(err error) { switch err.(type) {} }", becauseErrorSwitch},
		{"func f(err error) { switch e := err.(type) { default: _ = e } }", becauseErrorSwitch},
		{"type body struct { io.Reader; io.Closer }", becauseEmbeddedIO},
		{"type doer interface { do() }; type t struct { doer }", becauseEmbeddedOwn},
		{
			"type rt struct{}; func (*rt) RoundTrip(*http.Request) (*http.Response, error) { return nil, nil }; var c = &http.Client{Transport: &rt{}}",
			becauseCompiledField,
		},
	}

	for _, test := range cases {
		t.Run(test.code, func(t *testing.T) {
			found := findBrokenInCode(t, test.code)

			require.NotEmpty(t, found)
			for _, reason := range found {
				assert.Contains(t, reason, test.want)
			}
		})
	}
}

func TestFindBroken_LetsPassWhatWorks(t *testing.T) {
	cases := []string{
		"type hold struct { max int64 }; func f(h *hold) bool { return h.max > 1 }",
		"func f(mu *sync.Mutex) { mu.Lock(); defer mu.Unlock() }",
		"func f() { defer g(1) }; func g(int) {}",
		"func f(v int) { defer func() { g(v) }() }; func g(int) {}",
		"func f(v int) { defer g(v) }; func g(int) {}",
		"func f() { v := &struct{ n int }{}; defer g(v); v.n = 1 }; func g(*struct{ n int }) {}",
		"func f() { ctx, cancel := context.WithCancel(context.Background()); defer cancel(); <-ctx.Done() }",
		"func f(s []int) { for _, v := range s { v := v; go func() { _ = v }() } }",
		"func f(s []int) { for range s { func() { for _, v := range s { _ = v } }() } }",
		"type w struct { http.ResponseWriter; status int }",
		"type body struct { io.Reader; closer io.Closer }",
		"type r struct { ID string `json:\"id\"`; Inner *r `json:\"inner\"` }",
		"func f() func() { return func() { g() } }; func g() {}",
		"func f(rt http.RoundTripper) *http.Client { return &http.Client{Transport: rt} }",
		"func f(v any) { switch v.(type) { case int: } }",
		"func f(c chan int) { a := <-c; var b int; b, ok := <-c; b = <-c; _, _, _ = a, b, ok }",
		"func f(err error) { err = nil; a, b := 1, 2; a, b = b, a; _, _, _ = a, b, err }",
	}

	for _, code := range cases {
		t.Run(code, func(t *testing.T) {
			assert.Empty(t, findBrokenInCode(t, code))
		})
	}
}

// findBrokenInCode runs findBroken over declarations, which may use any package of the imports below.
func findBrokenInCode(t *testing.T, code string) []string {
	t.Helper()

	source := "package tap\n"
	for _, path := range []string{"bytes", "context", "io", "net/http", "os", "sync", "sync/atomic"} {
		if strings.Contains(code, path[strings.LastIndex(path, "/")+1:]+".") {
			source += fmt.Sprintf("import %q\n", path)
		}
	}

	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, "code.go", source+code, parser.SkipObjectResolution)
	require.NoError(t, err)

	return findBroken(t, fset, []*ast.File{file})
}

// findBroken returns a line, `file:line:column: reason`, for each construct in the files of a package that Yaegi breaks.
func findBroken(t *testing.T, fset *token.FileSet, files []*ast.File) []string {
	t.Helper()

	info := &types.Info{
		Types:      map[ast.Expr]types.TypeAndValue{},
		Instances:  map[*ast.Ident]types.Instance{},
		Defs:       map[*ast.Ident]types.Object{},
		Uses:       map[*ast.Ident]types.Object{},
		Selections: map[*ast.SelectorExpr]*types.Selection{},
	}
	config := types.Config{Importer: importer.Default()}
	pkg, err := config.Check("tap", fset, files, info)
	require.NoError(t, err)

	f := &finder{fset: fset, pkg: pkg, info: info, called: map[ast.Expr]bool{}, closures: map[types.Object]bool{}, changed: map[types.Object]bool{}}
	for _, file := range files {
		ast.Inspect(file, f.noteClosures)
		ast.Inspect(file, f.noteChanges)
	}
	for _, file := range files {
		for _, decl := range file.Decls {
			f.checkPackageVariable(decl)
		}
		ast.Inspect(file, f.check)
	}

	return f.found
}

type finder struct {
	fset *token.FileSet
	pkg  *types.Package
	info *types.Info
	// called are the expressions that stand in front of an argument list.
	called map[ast.Expr]bool
	// closures are the variables that a function literal is assigned to.
	closures map[types.Object]bool
	// changed are the variables that may be assigned to after they were defined.
	changed map[types.Object]bool

	found []string
}

func (f *finder) report(node ast.Node, reason string) {
	f.found = append(f.found, fmt.Sprintf("%s: %s", f.fset.Position(node.Pos()), reason))
}

func (f *finder) noteClosures(node ast.Node) bool {
	switch node := node.(type) {
	case *ast.AssignStmt:
		for i, value := range node.Rhs {
			if _, ok := value.(*ast.FuncLit); ok {
				f.noteClosure(node.Lhs[i])
			}
		}
	case *ast.ValueSpec:
		for i, value := range node.Values {
			if _, ok := value.(*ast.FuncLit); ok {
				f.noteClosure(node.Names[i])
			}
		}
	}

	return true
}

func (f *finder) noteClosure(variable ast.Expr) {
	if name, ok := variable.(*ast.Ident); ok {
		f.closures[f.info.ObjectOf(name)] = true
	}
}

func (f *finder) checkPackageVariable(decl ast.Decl) {
	general, ok := decl.(*ast.GenDecl)
	if !ok {
		return
	}
	for _, spec := range general.Specs {
		values, ok := spec.(*ast.ValueSpec)
		if !ok {
			continue
		}
		for _, value := range values.Values {
			if f.isMethodValue(value) {
				f.report(value, becausePackageMethod)
			}
		}
	}
}

func (f *finder) check(node ast.Node) bool {
	switch node := node.(type) {
	case *ast.SelectStmt:
		f.report(node, becauseSelect)
	case *ast.FuncDecl:
		f.checkMethod(node)
		f.checkClosures(node)
	case *ast.FuncType:
		if node.TypeParams != nil {
			f.report(node, becauseGenerics)
		}
	case *ast.TypeSpec:
		if node.TypeParams != nil {
			f.report(node, becauseGenerics)
		}
	case *ast.Ident:
		if _, ok := f.info.Instances[node]; ok {
			f.report(node, becauseGenerics)
		}
	case *ast.RangeStmt:
		f.checkRange(node)
		f.checkLoopVariables([]ast.Expr{node.Key, node.Value}, node.Body)
	case *ast.ForStmt:
		if init, ok := node.Init.(*ast.AssignStmt); ok {
			f.checkLoopVariables(init.Lhs, node.Body)
		}
	case *ast.AssignStmt:
		f.checkAssignment(node)
	case *ast.CallExpr:
		f.called[ast.Unparen(node.Fun)] = true
		f.checkBuiltin(node)
	case *ast.SelectorExpr:
		if !f.called[node] && f.isMethodValue(node) && f.info.Selections[node].Obj().Pkg() != f.pkg {
			f.report(node, becauseMethodValue)
		}
	case *ast.DeferStmt:
		f.checkDefer(node)
	case *ast.ReturnStmt:
		f.checkReturn(node)
	case *ast.TypeSwitchStmt:
		f.checkTypeSwitch(node)
	case *ast.StructType:
		f.checkStruct(node)
	case *ast.CompositeLit:
		f.checkLiteral(node)
	}

	return true
}

func (f *finder) checkMethod(decl *ast.FuncDecl) {
	if decl.Recv == nil {
		return
	}

	switch decl.Name.Name {
	case "MarshalJSON", "UnmarshalJSON", "MarshalText", "UnmarshalText":
		f.report(decl, becauseMarshaler)
	case "Error":
		f.report(decl, becauseErrorType)
	}
}

func (f *finder) checkRange(loop *ast.RangeStmt) {
	switch over := f.info.TypeOf(loop.X).Underlying().(type) {
	case *types.Basic:
		if over.Info()&types.IsInteger != 0 {
			f.report(loop, becauseRange)
		}
	case *types.Signature:
		f.report(loop, becauseRange)
	}
}

func (f *finder) checkLoopVariables(variables []ast.Expr, body *ast.BlockStmt) {
	loop := map[types.Object]bool{}
	for _, variable := range variables {
		if name, ok := variable.(*ast.Ident); ok && f.info.Defs[name] != nil {
			loop[f.info.Defs[name]] = true
		}
	}

	ast.Inspect(body, func(node ast.Node) bool {
		closure, ok := node.(*ast.FuncLit)
		if !ok {
			return true
		}
		ast.Inspect(closure.Body, func(node ast.Node) bool {
			if name, ok := node.(*ast.Ident); ok && loop[f.info.Uses[name]] {
				f.report(name, becauseLoopVariable)
			}

			return true
		})

		return false
	})
}

func (f *finder) checkAssignment(assignment *ast.AssignStmt) {
	for _, value := range assignment.Rhs {
		if len(assignment.Rhs) > 1 && f.info.Types[value].IsNil() {
			f.report(value, becauseNilAmongOthers)
		}
		if receive, ok := ast.Unparen(value).(*ast.UnaryExpr); ok && receive.Op == token.ARROW && !allNames(assignment.Lhs) {
			f.report(value, becauseReceiveInto)
		}
	}
}

func allNames(exprs []ast.Expr) bool {
	for _, expr := range exprs {
		if nameOf(expr) == nil {
			return false
		}
	}

	return true
}

func (f *finder) checkBuiltin(call *ast.CallExpr) {
	name, ok := ast.Unparen(call.Fun).(*ast.Ident)
	if !ok {
		return
	}
	if _, ok := f.info.Uses[name].(*types.Builtin); ok && (name.Name == "min" || name.Name == "max" || name.Name == "clear") {
		f.report(call, becauseBuiltin)
	}
}

func (f *finder) isMethodValue(expr ast.Expr) bool {
	selector, ok := ast.Unparen(expr).(*ast.SelectorExpr)
	if !ok {
		return false
	}
	selection := f.info.Selections[selector]

	return selection != nil && selection.Kind() == types.MethodVal
}

// checkClosures finds what a function makes beside what it defers in place.
func (f *finder) checkClosures(function *ast.FuncDecl) {
	var closures []ast.Node
	defers := false
	ast.Inspect(function, func(node ast.Node) bool {
		switch node := node.(type) {
		case *ast.DeferStmt:
			_, inPlace := ast.Unparen(node.Call.Fun).(*ast.FuncLit)
			_, builtin := f.info.Uses[nameOf(node.Call.Fun)].(*types.Func)
			defers = defers || !inPlace && builtin
		case *ast.FuncLit:
			closures = append(closures, node)

			return false
		}

		return true
	})
	if defers {
		for _, closure := range closures {
			f.report(closure, becauseClosureInFrame)
		}
	}
}

// nameOf returns an expression that is nothing but a name, or nil.
func nameOf(expr ast.Expr) *ast.Ident {
	name, _ := ast.Unparen(expr).(*ast.Ident)

	return name
}

// noteChanges remembers the variables that are assigned to, or whose address is taken.
func (f *finder) noteChanges(node ast.Node) bool {
	var changed []ast.Expr
	switch node := node.(type) {
	case *ast.AssignStmt:
		changed = node.Lhs
	case *ast.IncDecStmt:
		changed = []ast.Expr{node.X}
	case *ast.RangeStmt:
		changed = []ast.Expr{node.Key, node.Value}
	case *ast.UnaryExpr:
		if node.Op == token.AND {
			changed = []ast.Expr{node.X}
		}
	}
	for _, expr := range changed {
		// What is defined there is used elsewhere.
		if name, ok := expr.(*ast.Ident); ok && f.info.Uses[name] != nil {
			f.changed[f.info.Uses[name]] = true
		}
	}

	return true
}

func (f *finder) checkDefer(deferred *ast.DeferStmt) {
	for _, argument := range deferred.Call.Args {
		name, ok := ast.Unparen(argument).(*ast.Ident)
		if f.info.Types[argument].Value == nil && (!ok || f.changed[f.info.Uses[name]]) {
			f.report(argument, becauseDeferArgument)
		}
	}

	ast.Inspect(deferred.Call, func(node ast.Node) bool {
		call, ok := node.(*ast.CallExpr)
		if !ok {
			return true
		}
		if name, ok := ast.Unparen(call.Fun).(*ast.Ident); ok && f.closures[f.info.Uses[name]] {
			f.report(call, becauseDeferClosure)
		}

		return true
	})
}

func (f *finder) checkReturn(statement *ast.ReturnStmt) {
	for _, result := range statement.Results {
		name, ok := ast.Unparen(result).(*ast.Ident)
		if !ok {
			continue
		}
		if _, ok := f.info.Uses[name].(*types.Func); ok {
			f.report(result, becauseReturnFunction)
		}
	}
}

func (f *finder) checkTypeSwitch(statement *ast.TypeSwitchStmt) {
	ast.Inspect(statement.Assign, func(node ast.Node) bool {
		assertion, ok := node.(*ast.TypeAssertExpr)
		if ok && types.Identical(f.info.TypeOf(assertion.X), types.Universe.Lookup("error").Type()) {
			f.report(statement, becauseErrorSwitch)
		}

		return true
	})
}

func (f *finder) checkStruct(structure *ast.StructType) {
	marshalled := false
	for _, field := range structure.Fields.List {
		marshalled = marshalled || field.Tag != nil && strings.Contains(field.Tag.Value, "json:")
	}

	readers := 0
	for _, field := range structure.Fields.List {
		if len(field.Names) == 0 {
			f.checkEmbedded(field, marshalled)
			if f.isInterfaceOfIO(field.Type) {
				readers++
			}
			if readers > 1 {
				f.report(field, becauseEmbeddedIO)
			}

			continue
		}
		for _, name := range field.Names {
			if marshalled && !name.IsExported() {
				f.report(name, becauseHiddenField)
			}
		}
	}
}

func (f *finder) checkEmbedded(field *ast.Field, marshalled bool) {
	if marshalled {
		f.report(field, becauseEmbeddedField)
	}

	named := namedType(f.info.TypeOf(field.Type))
	if named != nil && types.IsInterface(named) && named.Obj().Pkg() == f.pkg {
		f.report(field, becauseEmbeddedOwn)
	}
}

func (f *finder) isInterfaceOfIO(expr ast.Expr) bool {
	named := namedType(f.info.TypeOf(expr))

	return named != nil && types.IsInterface(named) && named.Obj().Pkg() != nil && named.Obj().Pkg().Path() == "io"
}

func (f *finder) checkLiteral(literal *ast.CompositeLit) {
	if named := namedType(f.info.TypeOf(literal)); named == nil || named.Obj().Pkg() == f.pkg {
		return
	}

	for _, element := range literal.Elts {
		field, ok := element.(*ast.KeyValueExpr)
		if !ok || !types.IsInterface(f.info.TypeOf(field.Key)) {
			continue
		}
		value := f.info.TypeOf(field.Value)
		if named := namedType(value); named != nil && named.Obj().Pkg() == f.pkg && !types.IsInterface(value) {
			f.report(field, becauseCompiledField)
		}
	}
}

// namedType returns the named type that t is or points to, or nil.
func namedType(t types.Type) *types.Named {
	if pointer, ok := t.(*types.Pointer); ok {
		t = pointer.Elem()
	}
	named, _ := t.(*types.Named)

	return named
}
