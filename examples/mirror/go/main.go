// Keeps a ConfigMap beside each object: NAME-SUFFIX holds the object's spec.value, and goes when the object goes.
// SUFFIX is the operator's config.suffix, so that many copies can run side by side.
//
//go:debug randseednop=0
package main

import (
	"encoding/json"
	"fmt"
	"slices"

	torpor "torpor.dev/sdk/go"
)

// build is set when built (-ldflags "-X main.build=…"), so that copies differ.
var build = "go"

func init() {
	torpor.Register(torpor.Operator{
		Manifest:  `{"for": {"resource": "example.com/v1/widgets"}, "sdk": "go/0.1.0"}`,
		Reconcile: reconcile,
	})
}

func main() {}

type settings struct {
	Config struct {
		Suffix   string `json:"suffix"`
		Resource string `json:"resource"`
	} `json:"config"`
}

type primary struct {
	Spec struct {
		Value string `json:"value"`
	} `json:"spec"`
}

func reconcile(request torpor.Request) (torpor.Result, error) {
	var s settings
	s.Config.Suffix, s.Config.Resource = "mirror", "widgets"
	if err := read(torpor.Config, &s); err != nil {
		return torpor.Result{}, err
	}
	object, err := torpor.Kube(torpor.KubeRequest{Method: "GET", Path: fmt.Sprintf(
		"/apis/example.com/v1/namespaces/%s/%s/%s", request.Namespace, s.Config.Resource, request.Name)})
	if err != nil {
		return torpor.Result{}, err
	}
	name := request.Name + "-" + s.Config.Suffix
	path := fmt.Sprintf("/api/v1/namespaces/%s/configmaps/%s", request.Namespace, name)
	switch object.Status {
	case 404:
		return torpor.Result{}, send(torpor.KubeRequest{Method: "DELETE", Path: path}, 200, 202, 404)
	case 200:
	default:
		return torpor.Result{}, fmt.Errorf("reading %s: %d", request.Name, object.Status)
	}
	var p primary
	if err := json.Unmarshal(object.Body, &p); err != nil {
		return torpor.Result{}, err
	}
	body, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"name": name},
		"data": map[string]string{"value": p.Spec.Value, "by": "go", "build": build},
	})
	if err != nil {
		return torpor.Result{}, err
	}
	return torpor.Result{}, send(torpor.KubeRequest{
		Method: "PATCH", Path: path + "?fieldManager=mirror&force=true",
		ContentType: "application/apply-patch+yaml", Body: body,
	}, 200, 201)
}

func read(get func() ([]byte, error), into any) error {
	text, err := get()
	if err != nil {
		return err
	}
	return json.Unmarshal(text, into)
}

func send(request torpor.KubeRequest, expected ...int) error {
	answer, err := torpor.Kube(request)
	if err != nil {
		return err
	}
	if !slices.Contains(expected, answer.Status) {
		torpor.Log(torpor.Error, string(answer.Body))
		return fmt.Errorf("the API server answered %d", answer.Status)
	}
	return nil
}
