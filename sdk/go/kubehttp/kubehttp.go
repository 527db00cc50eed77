//go:build wasip1

// Package kubehttp is an http.RoundTripper on the host's kube_request, for clients that take one:
//
//	config := &rest.Config{Host: "http://kubernetes", Transport: kubehttp.Transport{}}
//	c, err := client.New(config, client.Options{Scheme: scheme})
package kubehttp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	torpor "torpor.dev/sdk/go"
)

// Transport sends requests to the Kubernetes API as the operator. Watches are refused: declare them in the manifest.
type Transport struct{}

// RoundTrip implements http.RoundTripper. A call without an answer is an error that wraps *torpor.CallError, or
// context.DeadlineExceeded when the deadline has passed.
func (Transport) RoundTrip(request *http.Request) (*http.Response, error) {
	if request.URL.Query().Get("watch") != "" {
		return nil, errors.New("kubehttp: a guest cannot watch; name the resource in the operator's manifest")
	}
	call := torpor.KubeRequest{
		Method:      request.Method,
		Path:        request.URL.RequestURI(),
		Accept:      request.Header.Get("Accept"),
		ContentType: request.Header.Get("Content-Type"),
	}
	if request.Body != nil {
		defer request.Body.Close()
		body, err := io.ReadAll(request.Body)
		if err != nil {
			return nil, fmt.Errorf("kubehttp: reading the request's body: %w", err)
		}
		call.Body = body
	}
	if deadline, ok := request.Context().Deadline(); ok {
		if call.Timeout = time.Until(deadline); call.Timeout <= 0 {
			return nil, context.DeadlineExceeded
		}
	}
	answer, err := torpor.Kube(call)
	if err != nil {
		var failed *torpor.CallError
		if errors.As(err, &failed) && failed.Code == "deadline" {
			return nil, fmt.Errorf("%w: %w", context.DeadlineExceeded, err)
		}
		return nil, err
	}
	return &http.Response{
		Status:        strconv.Itoa(answer.Status) + " " + http.StatusText(answer.Status),
		StatusCode:    answer.Status,
		Proto:         "HTTP/1.1",
		ProtoMajor:    1,
		ProtoMinor:    1,
		Header:        http.Header{"Content-Type": {answer.ContentType}},
		Body:          io.NopCloser(bytes.NewReader(answer.Body)),
		ContentLength: int64(len(answer.Body)),
		Request:       request,
	}, nil
}
