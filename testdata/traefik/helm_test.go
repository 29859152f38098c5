package traefik_test

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/traefik/traefik/v3/pkg/plugins"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// values are the values of Traefik's Helm chart that examples use. The chart cannot be had here. A value that is not here is an
// error, so that no example uses what is not looked at.
type values struct {
	Image struct {
		Registry   string `json:"registry"`
		Repository string `json:"repository"`
		Tag        string `json:"tag"`
	} `json:"image"`
	Experimental struct {
		Plugins map[string]plugins.Descriptor `json:"plugins"`
	} `json:"experimental"`
	Deployment struct {
		AdditionalVolumes []corev1.Volume `json:"additionalVolumes"`
	} `json:"deployment"`
	AdditionalVolumeMounts []corev1.VolumeMount `json:"additionalVolumeMounts"`
	AdditionalArguments    []string             `json:"additionalArguments"`
	ExtraObjects           []json.RawMessage    `json:"extraObjects"`
}

// readValues reads what the chart would hand to Traefik, and to the cluster.
func readValues(t *testing.T, e example) (contents, error) {
	t.Helper()
	var chart values
	if err := yaml.UnmarshalStrict([]byte(e.text), &chart); err != nil {
		return contents{}, err
	}

	manifests := string(bytes.Join(asBytes(chart.ExtraObjects), []byte("\n---\n")))
	objects, err := objectsIn(manifests)
	if err != nil {
		return contents{}, err
	}
	read, err := readObjects(t, objects, manifests)
	if err != nil {
		return contents{}, err
	}

	started, err := readArguments(chart.AdditionalArguments)
	if err != nil {
		return contents{}, err
	}
	read.plugins = started.plugins()
	for name, descriptor := range chart.Experimental.Plugins {
		read.plugins[name] = plugin{moduleName: descriptor.ModuleName, version: descriptor.Version}
	}
	read.images = append(read.images, imageOf(chart))

	return read, nil
}

func asBytes(objects []json.RawMessage) [][]byte {
	texts := make([][]byte, len(objects))
	for i, object := range objects {
		texts[i] = object
	}

	return texts
}

// imageOf returns the image of Traefik that a chart with these values starts.
func imageOf(chart values) string {
	repository := chart.Image.Repository
	if repository == "" {
		repository = "traefik"
	}
	if chart.Image.Tag == "" {
		return repository
	}

	return repository + ":" + chart.Image.Tag
}
