//! Trains a step folder in onnxruntime, through its C API, with nothing but the standard library:
//!
//!     rustc -O train.rs -L <onnxruntime>/lib -l onnxruntime && ./train run/step run/
//!
//! As train.c (see docs/how-to/loops.md). In a project of your own, the crates `ort` and `serde_json` take the place of the
//! modules `onnxruntime` and `json`.

use std::collections::HashMap;
use std::rc::Rc;
use std::{env, fs, process};

const BATCH: usize = 16;
const EPOCHS: usize = 5;

type Result<T> = std::result::Result<T, String>;
type Tensors = HashMap<String, Rc<onnxruntime::Tensor>>;

struct Column {
    name: String,
    dims: Vec<i64>,
    element: i32,
    row_bytes: usize,
    rows: Vec<u8>,
}

fn column(spec: &json::Json, folder: &str) -> Result<Column> {
    let name = spec.get("name")?.text()?.to_string();
    let (element, mut row_bytes) = match spec.get("dtype")?.text()? {
        "float32" => (onnxruntime::FLOAT, 4),
        "int64" => (onnxruntime::INT64, 8),
        other => return Err(format!("this loop feeds no {other}")),
    };
    let mut dims = vec![BATCH as i64];
    for size in &spec.get("shape")?.list()?[1..] {
        dims.push(size.number()? as i64);
        row_bytes *= size.number()? as usize;
    }
    let path = format!("{folder}/{name}.bin");
    let rows = fs::read(&path).map_err(|e| format!("cannot read {path}: {e}"))?;
    Ok(Column { name, dims, element, row_bytes, rows })
}

fn feed(known: &mut Tensors, columns: &[Column], begin: usize) -> Result<()> {
    for c in columns {
        let rows = c.rows[begin * c.row_bytes..(begin + BATCH) * c.row_bytes].to_vec();
        known.insert(c.name.clone(), Rc::new(onnxruntime::Tensor::new(rows, &c.dims, c.element)?));
    }
    Ok(())
}

fn train(step: &str, data: &str) -> Result<()> {
    let text = fs::read_to_string(format!("{step}/manifest.json")).map_err(|e| e.to_string())?;
    let manifest = json::parse(&text)?;
    let loss = manifest.get("loss_output")?.text()?;
    let open = |name| onnxruntime::Model::open(&format!("{step}/{name}.onnx"));
    let (init, train, eval) = (open("init")?, open("train")?, open("eval")?);

    let specs = manifest.get("inputs")?.list()?.iter().chain(manifest.get("targets")?.list()?);
    let columns = specs.map(|s| column(s, data)).collect::<Result<Vec<_>>>()?;
    let count = columns[0].rows.len() / columns[0].row_bytes;

    if let Some(c) = columns.iter().find(|c| c.rows.len() != count * c.row_bytes) {
        return Err(format!("{}.bin has not as many rows as the first input", c.name));
    }

    // batch, hyperparameters and state, by name
    let mut known = init.run(&Tensors::new())?;
    for (name, rate) in manifest.get("hyperparameters")?.members()? {
        let bytes = (rate.number()? as f32).to_le_bytes().to_vec();
        known.insert(name.clone(), Rc::new(onnxruntime::Tensor::new(bytes, &[], onnxruntime::FLOAT)?));
    }

    for _ in 0..EPOCHS {
        for begin in (0..=count - BATCH).step_by(BATCH) {
            feed(&mut known, &columns, begin)?;
            let found = train.run(&known)?;
            println!("{:.6}", found[loss].floats()?[0]);
            for s in manifest.get("state")?.list()? {
                known.insert(s.get("name")?.text()?.to_string(), found[s.get("next")?.text()?].clone());
            }
        }
    }
    feed(&mut known, &columns, 0)?;
    let mut used = known.clone(); // averages in place of weights, where the optimizer keeps some
    if let Ok(averages) = manifest.get("averages") {
        for (name, average) in averages.members()? {
            used.insert(name.clone(), known[average.text()?].clone());
        }
    }
    println!("eval {:.6}", eval.run(&used)?[loss].floats()?[0]);

    let mut weights = Vec::new();
    for s in manifest.get("state")?.list()? {
        if s.get("kind")?.text()? == "parameter" {
            weights.extend(used[s.get("name")?.text()?].floats()?.iter().flat_map(|w| w.to_le_bytes()));
        }
    }
    fs::write(format!("{data}/weights.bin"), weights).map_err(|e| e.to_string())
}

fn main() {
    let words: Vec<String> = env::args().collect();
    if words.len() != 3 {
        eprintln!("usage: train STEP DATA");
        process::exit(2);
    }
    if let Err(message) = train(&words[1], &words[2]) {
        eprintln!("{message}");
        process::exit(1);
    }
}

/// The part of onnxruntime's C API that a loop needs. Its table of functions only ever grows at the end, so their
/// positions hold for every onnxruntime from 1.18 on.
mod onnxruntime {
    use super::{Rc, Result, Tensors};
    use std::ffi::{c_char, c_void, CStr, CString};
    use std::ptr::{null, null_mut};

    pub const FLOAT: i32 = 1;
    pub const INT64: i32 = 7;
    type Ptr = *mut c_void;

    #[repr(C)]
    struct Base {
        get_api: extern "C" fn(u32) -> *const Ptr,
    }
    extern "C" {
        fn OrtGetApiBase() -> *const Base;
    }

    /// Calls the function at a place of the table: `call!(7, (Ptr, u32), environment, 3)`.
    macro_rules! call {
        ($place:expr, ($($kind:ty),*) $(, $argument:expr)*) => {{
            // SAFETY: the place and the kinds are those of onnxruntime_c_api.h
            let status = unsafe {
                let function: extern "C" fn($($kind),*) -> Ptr = std::mem::transmute(function_at($place));
                function($($argument),*)
            };
            checked(status)
        }};
    }

    fn function_at(place: usize) -> Ptr {
        // SAFETY: version 18 of the table has all places that are used here
        unsafe { *((*OrtGetApiBase()).get_api)(18).add(place) }
    }

    fn checked(status: Ptr) -> Result<()> {
        if status.is_null() {
            return Ok(());
        }
        // SAFETY: GetErrorMessage gives a text that lives as long as the status
        let text = unsafe {
            let message: extern "C" fn(Ptr) -> *const c_char = std::mem::transmute(function_at(2));
            CStr::from_ptr(message(status)).to_string_lossy().into_owned()
        };
        release(93, status);
        Err(text)
    }

    fn release(place: usize, object: Ptr) {
        // SAFETY: the place is that of the Release function for this kind of object
        let function: extern "C" fn(Ptr) = unsafe { std::mem::transmute(function_at(place)) };
        function(object);
    }

    pub struct Tensor {
        value: Ptr,
        _memory: Vec<u8>, // that the value lies in, if it is ours
    }

    impl Tensor {
        /// A tensor over these bytes.
        pub fn new(mut bytes: Vec<u8>, dims: &[i64], element: i32) -> Result<Tensor> {
            let (mut memory, mut value): (Ptr, Ptr) = (null_mut(), null_mut());
            call!(69, (i32, i32, *mut Ptr), 1, 0, &mut memory)?; // CreateCpuMemoryInfo
            let made = call!(49, (Ptr, *mut u8, usize, *const i64, usize, i32, *mut Ptr), // CreateTensorWithData…
                memory, bytes.as_mut_ptr(), bytes.len(), dims.as_ptr(), dims.len(), element, &mut value);
            release(94, memory);
            made.map(|()| Tensor { value, _memory: bytes })
        }

        /// Its numbers, which must be float32.
        pub fn floats(&self) -> Result<&[f32]> {
            let (mut shape, mut data): (Ptr, *mut f32) = (null_mut(), null_mut());
            let (mut count, mut element) = (0usize, 0i32);
            call!(65, (Ptr, *mut Ptr), self.value, &mut shape)?; // GetTensorTypeAndShape
            call!(64, (Ptr, *mut usize), shape, &mut count)?; // GetTensorShapeElementCount
            call!(60, (Ptr, *mut i32), shape, &mut element)?; // GetTensorElementType
            release(99, shape);
            if element != FLOAT {
                return Err("a tensor is not float32".to_string());
            }
            call!(51, (Ptr, *mut *mut f32), self.value, &mut data)?; // GetTensorMutableData
            // SAFETY: onnxruntime has just said that so many numbers lie there, for as long as the value lives
            Ok(if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(data, count) } })
        }
    }

    impl Drop for Tensor {
        fn drop(&mut self) {
            release(96, self.value);
        }
    }

    pub struct Model {
        session: Ptr,
        inputs: Vec<CString>,
        outputs: Vec<CString>,
    }

    impl Model {
        pub fn open(path: &str) -> Result<Model> {
            let (mut environment, mut options, mut session): (Ptr, Ptr, Ptr) = (null_mut(), null_mut(), null_mut());
            let (name, path) = (CString::new("train").unwrap(), CString::new(path).map_err(|e| e.to_string())?);
            call!(3, (i32, *const c_char, *mut Ptr), 2, name.as_ptr(), &mut environment)?; // CreateEnv: one a process
            call!(10, (*mut Ptr), &mut options)?; // CreateSessionOptions
            let made = call!(7, (Ptr, *const c_char, Ptr, *mut Ptr), environment, path.as_ptr(), options, &mut session);
            release(100, options);
            made?;
            let inputs = names(session, 30, 36)?; // SessionGetInputCount, SessionGetInputName
            let outputs = names(session, 31, 37)?;
            Ok(Model { session, inputs, outputs })
        }

        /// The outputs, by name; each input is fed from the tensor of its name.
        pub fn run(&self, known: &Tensors) -> Result<Tensors> {
            let mut fed: Vec<Ptr> = Vec::new();
            for name in self.inputs.iter().map(|n| n.to_string_lossy()) {
                fed.push(known.get(name.as_ref()).ok_or(format!("nothing to feed {name}"))?.value);
            }
            let pointers = |names: &[CString]| names.iter().map(|n| n.as_ptr()).collect::<Vec<_>>();
            let (inputs, outputs) = (pointers(&self.inputs), pointers(&self.outputs));
            let mut given: Vec<Ptr> = vec![null_mut(); outputs.len()];
            type Names = *const *const c_char;
            call!(9, (Ptr, *const c_void, Names, *const Ptr, usize, Names, usize, *mut Ptr), // Run
                self.session, null(), inputs.as_ptr(), fed.as_ptr(), fed.len(), outputs.as_ptr(), outputs.len(),
                given.as_mut_ptr())?;
            let values = given.into_iter().map(|value| Rc::new(Tensor { value, _memory: Vec::new() }));
            Ok(self.outputs.iter().map(|n| n.to_string_lossy().into_owned()).zip(values).collect())
        }
    }

    impl Drop for Model {
        fn drop(&mut self) {
            release(95, self.session);
        }
    }

    fn names(session: Ptr, count_place: usize, name_place: usize) -> Result<Vec<CString>> {
        let (mut allocator, mut count): (Ptr, usize) = (null_mut(), 0);
        call!(78, (*mut Ptr), &mut allocator)?; // GetAllocatorWithDefaultOptions
        call!(count_place, (Ptr, *mut usize), session, &mut count)?;
        let mut found = Vec::new();
        for i in 0..count {
            let mut name: *mut c_char = null_mut();
            call!(name_place, (Ptr, usize, Ptr, *mut *mut c_char), session, i, allocator, &mut name)?;
            // SAFETY: onnxruntime has written a text that ends with a zero
            found.push(unsafe { CStr::from_ptr(name) }.to_owned());
            call!(76, (Ptr, *mut c_char), allocator, name)?; // AllocatorFree
        }
        Ok(found)
    }
}

/// A JSON reader, large enough for manifest.json.
mod json {
    use super::Result;

    pub enum Json {
        Nothing,
        Number(f64),
        Text(String),
        List(Vec<Json>),
        Object(Vec<(String, Json)>),
    }

    impl Json {
        pub fn get(&self, key: &str) -> Result<&Json> {
            let found = self.members()?.iter().find(|(name, _)| name == key);
            found.map(|(_, value)| value).ok_or(format!("manifest.json has no {key}"))
        }
        pub fn members(&self) -> Result<&[(String, Json)]> {
            if let Json::Object(members) = self { Ok(members) } else { Err("an object was expected".into()) }
        }
        pub fn list(&self) -> Result<&[Json]> {
            if let Json::List(members) = self { Ok(members) } else { Err("a list was expected".into()) }
        }
        pub fn text(&self) -> Result<&str> {
            if let Json::Text(text) = self { Ok(text) } else { Err("a text was expected".into()) }
        }
        pub fn number(&self) -> Result<f64> {
            if let Json::Number(number) = self { Ok(*number) } else { Err("a number was expected".into()) }
        }
    }

    pub fn parse(text: &str) -> Result<Json> {
        Reader { rest: text.chars().collect(), at: 0 }.value()
    }

    struct Reader {
        rest: Vec<char>,
        at: usize,
    }

    impl Reader {
        fn next(&mut self) -> Result<char> {
            self.at += 1;
            self.rest.get(self.at - 1).copied().ok_or("manifest.json is cut".to_string())
        }
        /// The next character that is no space; it is not taken.
        fn peek(&mut self) -> Result<char> {
            while self.rest.get(self.at).is_some_and(|c| c.is_whitespace()) {
                self.at += 1;
            }
            self.rest.get(self.at).copied().ok_or("manifest.json is cut".to_string())
        }
        fn members<T>(&mut self, close: char, member: impl Fn(&mut Reader) -> Result<T>) -> Result<Vec<T>> {
            let mut found = Vec::new();
            self.next()?;
            while self.peek()? != close {
                found.push(member(self)?);
                if self.peek()? == ',' {
                    self.next()?;
                }
            }
            self.next()?;
            Ok(found)
        }
        fn value(&mut self) -> Result<Json> {
            match self.peek()? {
                '"' => Ok(Json::Text(self.text()?)),
                '[' => Ok(Json::List(self.members(']', Reader::value)?)),
                '{' => Ok(Json::Object(self.members('}', |r| {
                    let key = r.text()?;
                    r.peek()?;
                    r.next()?; // the colon
                    Ok((key, r.value()?))
                })?)),
                _ => {
                    let begin = self.at;
                    while self.rest.get(self.at).is_some_and(|c| c.is_alphanumeric() || "+-.".contains(*c)) {
                        self.at += 1;
                    }
                    let word: String = self.rest[begin..self.at].iter().collect();
                    Ok(word.parse().map(Json::Number).unwrap_or(Json::Nothing)) // true, false, null
                }
            }
        }
        fn text(&mut self) -> Result<String> {
            let mut found = String::new();
            self.peek()?;
            self.next()?; // the quotation mark
            loop {
                match self.next()? {
                    '"' => return Ok(found),
                    '\\' => match self.next()? {
                        'n' => found.push('\n'),
                        't' => found.push('\t'),
                        'u' => {
                            let digits: String = (0..4).map(|_| self.next()).collect::<Result<_>>()?;
                            let code = u32::from_str_radix(&digits, 16).map_err(|e| e.to_string())?;
                            found.push(char::from_u32(code).unwrap_or('?'));
                        }
                        other => found.push(other),
                    },
                    other => found.push(other),
                }
            }
        }
    }
}
