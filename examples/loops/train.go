// Trains a step folder in onnxruntime, with the module github.com/yalue/onnxruntime_go:
//
//	go mod init train && go get github.com/yalue/onnxruntime_go && go build -o train train.go
//	ONNXRUNTIME=<onnxruntime>/lib/libonnxruntime.so ./train run/step run/
//
// As train.c (see docs/how-to/loops.md).
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	ort "github.com/yalue/onnxruntime_go"
)

const (
	batchSize = 16
	epochs    = 5
)

type spec struct {
	Name, Dtype, Next, Kind string
	Shape                   []any // numbers, or names of sizes that are open
}

type manifest struct {
	Inputs, Targets, State []spec
	Hyperparameters        map[string]float32
	Averages               map[string]string
	LossOutput             string `json:"loss_output"`
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func elementType(s spec) (ort.TensorElementDataType, int) {
	switch s.Dtype {
	case "float32":
		return ort.TensorElementDataTypeFloat, 4
	case "int64":
		return ort.TensorElementDataTypeInt64, 8
	}
	check(fmt.Errorf("this loop feeds no %s", s.Dtype))
	return 0, 0
}

// A tensor over these bytes; without dimensions it is a Scalar, which begins as zero.
func tensor(s spec, shape []int64, data []byte) (made ort.Value) {
	var err error
	element, _ := elementType(s)
	if len(shape) > 0 {
		made, err = ort.NewCustomDataTensor(shape, data, element)
	} else if s.Dtype == "int64" {
		made, err = ort.NewScalar[int64](0)
	} else {
		made, err = ort.NewScalar[float32](0)
	}
	check(err)
	return made
}

// Memory for a state tensor, whose sizes are all known.
func empty(s spec) ort.Value {
	_, size := elementType(s)
	shape := []int64{}
	for _, d := range s.Shape {
		shape = append(shape, int64(d.(float64)))
		size *= int(d.(float64))
	}
	return tensor(s, shape, make([]byte, size))
}

type model struct {
	session         *ort.DynamicAdvancedSession
	inputs, outputs []string
}

// A model, for some of its outputs.
func open(path string, outputs ...string) model {
	inputs, _, err := ort.GetInputOutputInfo(path)
	check(err)
	m := model{outputs: outputs}
	for _, i := range inputs {
		m.inputs = append(m.inputs, i.Name)
	}
	m.session, err = ort.NewDynamicAdvancedSession(path, m.inputs, m.outputs, nil)
	check(err)
	return m
}

// Feeds each input from the tensor of its name, and writes each output into the tensor of its name. (This module cannot
// give an output without dimensions memory of its own.)
func (m model) run(known, given map[string]ort.Value) {
	pick := func(names []string, from map[string]ort.Value) (found []ort.Value) {
		for _, name := range names {
			value, there := from[name]
			if !there {
				check(fmt.Errorf("there is no tensor %s", name))
			}
			found = append(found, value)
		}
		return found
	}
	if len(m.inputs) > 0 {
		check(m.session.Run(pick(m.inputs, known), pick(m.outputs, given)))
		return
	}
	binding, err := m.session.CreateIoBinding() // without inputs, this module runs a model only so
	check(err)
	for _, name := range m.outputs {
		check(binding.BindOutput(name, given[name]))
	}
	check(m.session.RunWithBinding(binding))
	check(binding.Destroy())
}

type column struct {
	spec
	shape    []int64
	rowBytes int
	rows     []byte
}

func read(s spec, folder string) column {
	_, size := elementType(s)
	c := column{spec: s, shape: []int64{batchSize}, rowBytes: size}
	for _, d := range s.Shape[1:] {
		c.shape = append(c.shape, int64(d.(float64)))
		c.rowBytes *= int(d.(float64))
	}
	var err error
	c.rows, err = os.ReadFile(filepath.Join(folder, s.Name+".bin"))
	check(err)
	return c
}

func main() {
	if len(os.Args) != 3 {
		check(fmt.Errorf("usage: train STEP DATA"))
	}
	folder, data := os.Args[1], os.Args[2]
	ort.SetSharedLibraryPath(os.Getenv("ONNXRUNTIME"))
	check(ort.InitializeEnvironment())
	defer ort.DestroyEnvironment()

	text, err := os.ReadFile(filepath.Join(folder, "manifest.json"))
	check(err)
	var m manifest
	check(json.Unmarshal(text, &m))
	var columns []column
	for _, s := range append(m.Inputs, m.Targets...) {
		columns = append(columns, read(s, data))
	}
	count := len(columns[0].rows) / columns[0].rowBytes
	for _, c := range columns {
		if len(c.rows) != count*c.rowBytes {
			check(fmt.Errorf("%s.bin has not as many rows as the first input", c.Name))
		}
	}
	loss, err := ort.NewEmptyScalar[float32]()
	check(err)
	known := map[string]ort.Value{}                  // batch, hyperparameters and state, by name
	next := map[string]ort.Value{m.LossOutput: loss} // what a step writes
	var names, outputs []string
	for _, s := range m.State {
		names, outputs = append(names, s.Name), append(outputs, s.Next)
		known[s.Name], next[s.Next] = empty(s), empty(s)
	}
	open(filepath.Join(folder, "init.onnx"), names...).run(nil, known)
	train := open(filepath.Join(folder, "train.onnx"), append(outputs, m.LossOutput)...)
	eval := open(filepath.Join(folder, "eval.onnx"), m.LossOutput)
	for name, rate := range m.Hyperparameters {
		known[name], err = ort.NewScalar(rate)
		check(err)
	}
	feed := func(begin int) {
		for _, c := range columns {
			if old, there := known[c.Name]; there {
				check(old.Destroy())
			}
			known[c.Name] = tensor(c.spec, c.shape, c.rows[begin*c.rowBytes:(begin+batchSize)*c.rowBytes])
		}
	}

	for epoch := 0; epoch < epochs; epoch++ {
		for begin := 0; begin+batchSize <= count; begin += batchSize {
			feed(begin)
			train.run(known, next)
			fmt.Printf("%.6f\n", loss.GetData())
			for _, s := range m.State { // what was written is read next, and written over after that
				known[s.Name], next[s.Next] = next[s.Next], known[s.Name]
			}
		}
	}
	feed(0)
	used := map[string]ort.Value{} // averages in place of weights, where the optimizer keeps some
	for name, value := range known {
		used[name] = value
	}
	for name, average := range m.Averages {
		used[name] = known[average]
	}
	eval.run(used, next)
	fmt.Printf("eval %.6f\n", loss.GetData())

	var weights []byte
	for _, s := range m.State {
		if s.Kind == "parameter" {
			weights = append(weights, used[s.Name].(*ort.CustomDataTensor).GetData()...)
		}
	}
	check(os.WriteFile(filepath.Join(data, "weights.bin"), weights, 0o644))
}
