// Package torpor is the Torpor operator ABI (proto/wit/abi.md) for Go.
//
// An operator is a package main that registers itself and is built as a reactor:
//
//	//go:debug randseednop=0
//	package main
//
//	func init() {
//		torpor.Register(torpor.Operator{
//			Manifest:  `{"for": {"resource": "example.com/v1/widgets"}}`,
//			Reconcile: reconcile,
//		})
//	}
//
//	func main() {}
//
//	GOOS=wasip1 GOARCH=wasm go build -buildmode=c-shared -ldflags='-s -w' -o operator.wasm
//
// Package kubehttp gives clients that take an http.RoundTripper (controller-runtime, client-go) their transport.
//
// Goroutines run only while a call is under way: end them before Reconcile returns. The top-level functions of
// math/rand are reseeded at every wake if the main package has the go:debug line above; those of math/rand/v2 cannot
// be, and repeat what the image holds: use crypto/rand where a name must be unique.
package torpor

import "time"

// Request is the key to reconcile and why. Level-triggered: do not depend on Cause.
type Request struct {
	Namespace, Name string
	// Cause is start, watch, timer, resync, retry or wake.
	Cause string
	// Attempt is 0 at first, counted up by retries of the same key.
	Attempt int
	// Traceparent is the W3C trace context of the change, or empty.
	Traceparent string
}

// Result is how a reconcile ended well. The zero value: nothing to do until the next event.
type Result struct {
	// RequeueAfter asks for another reconcile after this time, whatever happens.
	RequeueAfter time.Duration
}

// Operator is what a module exports.
type Operator struct {
	// Manifest is JSON as proto/wit/abi.md has it.
	Manifest string
	// Describe, if set, runs once at install instead, before the image is taken: build clients and caches here.
	Describe func() (string, error)
	// Reconcile brings the world in line with one key. An error is retried with back-off.
	Reconcile func(Request) (Result, error)
	// Wake, if set, runs after every restore from the image: reseed private random sources here.
	Wake func()
}

// KubeRequest is a request to the Kubernetes API, as the operator.
type KubeRequest struct {
	Method string
	// Path and query, from /api or /apis.
	Path string
	// Accept and ContentType are application/json if empty.
	Accept, ContentType string
	Body                []byte
	// Timeout of 0: as long as the reconcile has.
	Timeout time.Duration
}

// Response is what the API server answered, whatever the status.
type Response struct {
	Status      int
	ContentType string
	Body        []byte
}

// CallError says why a call got no answer. Code is deadline, unavailable, fenced, denied, too-large, unimplemented or
// invalid.
type CallError struct{ Code, Message string }

func (e *CallError) Error() string { return e.Code + ": " + e.Message }

// Level is how much a line of log matters.
type Level int32

// The levels of Log.
const (
	Debug Level = iota
	Info
	Warning
	Error
)
