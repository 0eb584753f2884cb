//! The safe side of the C++ shim (`shim.cpp`): a TorchScript module with its signature, its
//! buffers, and calls by argument name, none of which `tch` exposes.

mod sites;

pub(crate) use sites::{Convolution, Layout, Site, Sites, Use};

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::ptr::NonNull;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use crate::error::without_backtrace;

#[repr(C)]
struct RawModule {
    _opaque: [u8; 0],
}

type EmitArgument = extern "C" fn(*mut c_void, *const c_char, *const c_char, c_int);
type EmitTensor = extern "C" fn(*mut c_void, *const c_char, *mut C_tensor);
type EmitBytes = extern "C" fn(*mut c_void, *const c_void, usize);

unsafe extern "C" {
    fn gp_libtorch_version() -> *const c_char;
    fn gp_free_message(message: *mut c_char);
    fn gp_module_load(
        path: *const c_char,
        device: *const c_char,
        out: *mut *mut RawModule,
    ) -> *mut c_char;
    fn gp_module_free(module: *mut RawModule);
    fn gp_module_set_training(module: *mut RawModule, training: c_int) -> *mut c_char;
    fn gp_module_is_training(module: *const RawModule) -> c_int;
    fn gp_module_signature(
        module: *const RawModule,
        method: *const c_char,
        context: *mut c_void,
        emit: EmitArgument,
    ) -> *mut c_char;
    fn gp_module_tensors(
        module: *const RawModule,
        buffers: c_int,
        context: *mut c_void,
        emit: EmitTensor,
    ) -> *mut c_char;
    fn gp_module_cast(module: *mut RawModule, scalar_type: c_int) -> *mut c_char;
    fn gp_module_forward(
        module: *mut RawModule,
        names: *const *const c_char,
        inputs: *const *mut C_tensor,
        count: usize,
        optimize: c_int,
        context: *mut c_void,
        emit: EmitTensor,
    ) -> *mut c_char;
    fn gp_module_forward_cached(
        module: *mut RawModule,
        inputs: *const *const C_tensor,
        cache: *const *const C_tensor,
        count: usize,
        optimize: c_int,
        context: *mut c_void,
        emit: EmitTensor,
    ) -> *mut c_char;
    fn gp_module_save(
        module: *const RawModule,
        context: *mut c_void,
        emit: EmitBytes,
    ) -> *mut c_char;
    fn gp_generator_state(device: *const c_char, out: *mut *mut C_tensor) -> *mut c_char;
    fn gp_set_generator_state(device: *const c_char, state: *const C_tensor) -> *mut c_char;
}

/// One argument of a module's forward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Argument {
    pub name: String,
    /// Its TorchScript type as written in Python: `Tensor`, `Optional[Tensor]`, `int`.
    pub type_name: String,
    pub has_default: bool,
}

/// A loaded TorchScript module. Errors are libtorch's own words.
pub(crate) struct Module {
    raw: NonNull<RawModule>,
}

// SAFETY: the module is a reference-counted C++ object with no ties to the thread that made it, and
// `Module` hands out no reference into it.
unsafe impl Send for Module {}

impl Module {
    pub fn load(path: &Path, device: Device) -> Result<Self, String> {
        let path = path.to_str().ok_or("the path is not UTF-8")?;
        let path = CString::new(path).map_err(|_| "the path holds a zero byte")?;
        let device = CString::new(device_name(device)).map_err(|error| error.to_string())?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: both strings live through the call, and `raw` is written before success.
        check(unsafe { gp_module_load(path.as_ptr(), device.as_ptr(), &mut raw) })?;
        NonNull::new(raw).map(|raw| Self { raw }).ok_or_else(|| "no module was loaded".into())
    }

    pub fn set_training(&mut self, training: bool) -> Result<(), String> {
        // SAFETY: `raw` is a live module for as long as `self` is.
        check(unsafe { gp_module_set_training(self.raw.as_ptr(), c_int::from(training)) })
    }

    pub fn is_training(&self) -> bool {
        // SAFETY: as above.
        unsafe { gp_module_is_training(self.raw.as_ptr()) != 0 }
    }

    /// The arguments of forward.
    pub fn arguments(&self) -> Result<Vec<Argument>, String> {
        let (arguments, _) =
            self.signature("forward")?.ok_or("the module has no method named forward")?;
        Ok(arguments)
    }

    /// The arguments of a method and the type of its result; none without such a method.
    pub fn signature(&self, method: &str) -> Result<Option<(Vec<Argument>, String)>, String> {
        let method = CString::new(method).map_err(|error| error.to_string())?;
        let mut arguments: Vec<Argument> = Vec::new();
        let context = (&raw mut arguments).cast();
        // SAFETY: the string lives through the call; `collect_argument` takes the context for the
        // vector it is, during the call only.
        check(unsafe {
            gp_module_signature(self.raw.as_ptr(), method.as_ptr(), context, collect_argument)
        })?;
        Ok(arguments.pop().map(|result| (arguments, result.type_name)))
    }

    /// Parameters with their dotted names; the same tensor comes once for every name it has.
    pub fn named_parameters(&self) -> Result<Vec<(String, Tensor)>, String> {
        self.tensors(false)
    }

    pub fn named_buffers(&self) -> Result<Vec<(String, Tensor)>, String> {
        self.tensors(true)
    }

    fn tensors(&self, buffers: bool) -> Result<Vec<(String, Tensor)>, String> {
        let mut tensors: Vec<(String, Tensor)> = Vec::new();
        let context = (&raw mut tensors).cast();
        let buffers = c_int::from(buffers);
        // SAFETY: `collect_tensor` takes the context for the vector it is, during the call only.
        check(unsafe { gp_module_tensors(self.raw.as_ptr(), buffers, context, collect_tensor) })?;
        Ok(tensors)
    }

    /// Casts floating-point parameters and buffers, and leaves integer ones alone.
    pub fn cast(&mut self, kind: Kind) -> Result<(), String> {
        // The numbers of c10::ScalarType; tch keeps its own to itself.
        let scalar_type = match kind {
            Kind::Half => 5,
            Kind::Float => 6,
            Kind::Double => 7,
            Kind::BFloat16 => 15,
            _ => return Err(format!("weights cannot be cast to {kind:?}")),
        };
        // SAFETY: `raw` is a live module for as long as `self` is.
        check(unsafe { gp_module_cast(self.raw.as_ptr(), scalar_type) })
    }

    /// Calls forward by argument names and returns the tensors of its output: one with an empty
    /// name, or those of a tuple, list or dictionary under their indices or keys.
    pub fn forward(
        &self,
        inputs: &[(&str, &Tensor)],
        optimize: bool,
    ) -> Result<Vec<(String, Tensor)>, String> {
        let names = inputs
            .iter()
            .map(|(name, _)| CString::new(*name).map_err(|_| "an argument name holds a zero byte"))
            .collect::<Result<Vec<_>, _>>()?;
        let names: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
        let tensors: Vec<*mut C_tensor> =
            inputs.iter().map(|(_, tensor)| tensor.as_ptr().cast_mut()).collect();
        let mut outputs: Vec<(String, Tensor)> = Vec::new();
        let context = (&raw mut outputs).cast();
        // SAFETY: names and tensors outlive the call, which copies the tensors' handles and does
        // not write through the pointers; the context is the vector that `collect_tensor` expects.
        check(unsafe {
            gp_module_forward(
                self.raw.as_ptr(),
                names.as_ptr(),
                tensors.as_ptr(),
                inputs.len(),
                c_int::from(optimize),
                context,
                collect_tensor,
            )
        })?;
        Ok(outputs)
    }

    /// Calls forward_cached with token ids, mask, positions and a cache; returns the logits and the
    /// new cache. The module must have the method with the schema that `Policy::sample` documents.
    pub fn forward_cached(
        &self,
        inputs: [&Tensor; 3],
        cache: &[Tensor],
        optimize: bool,
    ) -> Result<(Tensor, Vec<Tensor>), String> {
        let inputs = inputs.map(Tensor::as_ptr);
        let seen: Vec<*const C_tensor> = cache.iter().map(Tensor::as_ptr).collect();
        let mut outputs: Vec<(String, Tensor)> = Vec::new();
        let context = (&raw mut outputs).cast();
        // SAFETY: the tensors outlive the call, which copies their handles and reads three inputs and
        // `seen.len()` of the cache; the context is the vector that `collect_tensor` expects.
        check(unsafe {
            gp_module_forward_cached(
                self.raw.as_ptr(),
                inputs.as_ptr(),
                seen.as_ptr(),
                seen.len(),
                c_int::from(optimize),
                context,
                collect_tensor,
            )
        })?;
        let mut tensors = outputs.into_iter().map(|(_, tensor)| tensor);
        let logits = tensors.next().ok_or("it returned no tensor")?;
        Ok((logits, tensors.collect()))
    }

    /// Writes the module as a file that `torch.jit.load` reads, front to back.
    pub fn save(&self, writer: &mut dyn Write) -> std::io::Result<()> {
        let mut sink = Sink { writer, result: Ok(()) };
        let context = (&raw mut sink).cast();
        // SAFETY: `write_bytes` takes the context for the sink it is, during the call only.
        let saved = check(unsafe { gp_module_save(self.raw.as_ptr(), context, write_bytes) });
        sink.result?;
        saved.map_err(|message| std::io::Error::other(without_backtrace(&message)))
    }
}

/// Where the bytes of a file go. libtorch is not told of a failure; what comes after it is dropped.
struct Sink<'a> {
    writer: &'a mut dyn Write,
    result: std::io::Result<()>,
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: `raw` came from gp_module_load and is freed once.
        unsafe { gp_module_free(self.raw.as_ptr()) }
    }
}

/// The state of a device's default random generator: bytes, on the CPU.
pub(crate) fn generator_state(device: Device) -> Result<Tensor, String> {
    let device = CString::new(device_name(device)).map_err(|error| error.to_string())?;
    let mut state = std::ptr::null_mut();
    // SAFETY: the string lives through the call, and `state` is written before success.
    check(unsafe { gp_generator_state(device.as_ptr(), &mut state) })?;
    // SAFETY: the tensor is ours, and tch frees it as it was made.
    Ok(unsafe { Tensor::from_ptr(state) })
}

/// Puts a device's default random generator into a state that it had before.
pub(crate) fn set_generator_state(device: Device, state: &Tensor) -> Result<(), String> {
    let device = CString::new(device_name(device)).map_err(|error| error.to_string())?;
    // SAFETY: string and tensor live through the call, which copies the state.
    check(unsafe { gp_set_generator_state(device.as_ptr(), state.as_ptr()) })
}

/// The version of libtorch that this was built with.
pub(crate) fn libtorch_version() -> String {
    // SAFETY: a string literal of the shim.
    unsafe { CStr::from_ptr(gp_libtorch_version()) }.to_string_lossy().into_owned()
}

/// The name by which libtorch parses a device.
pub(crate) fn device_name(device: Device) -> String {
    match device {
        Device::Cpu => "cpu".into(),
        Device::Cuda(index) => format!("cuda:{index}"),
        Device::Mps => "mps".into(),
        Device::Vulkan => "vulkan".into(),
    }
}

fn check(message: *mut c_char) -> Result<(), String> {
    if message.is_null() {
        return Ok(());
    }
    // SAFETY: a message of the shim is a zero-terminated string that we own.
    let text = unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned();
    // SAFETY: freed once, by the allocator that made it.
    unsafe { gp_free_message(message) };
    Err(text)
}

extern "C" fn collect_argument(
    context: *mut c_void,
    name: *const c_char,
    type_name: *const c_char,
    has_default: c_int,
) {
    // SAFETY: the shim passes back the context it was given, and strings that live through the call.
    let (arguments, name, type_name) = unsafe {
        (&mut *context.cast::<Vec<Argument>>(), CStr::from_ptr(name), CStr::from_ptr(type_name))
    };
    arguments.push(Argument {
        name: name.to_string_lossy().into_owned(),
        type_name: type_name.to_string_lossy().into_owned(),
        has_default: has_default != 0,
    });
}

extern "C" fn collect_tensor(context: *mut c_void, name: *const c_char, tensor: *mut C_tensor) {
    // SAFETY: as above; the tensor is ours from here on, and tch frees it as it was made.
    let (tensors, name, tensor) = unsafe {
        (
            &mut *context.cast::<Vec<(String, Tensor)>>(),
            CStr::from_ptr(name),
            Tensor::from_ptr(tensor),
        )
    };
    tensors.push((name.to_string_lossy().into_owned(), tensor));
}

extern "C" fn write_bytes(context: *mut c_void, bytes: *const c_void, count: usize) {
    // SAFETY: the shim passes back the context it was given.
    let sink = unsafe { &mut *context.cast::<Sink>() };
    if count == 0 || sink.result.is_err() {
        return;
    }
    // SAFETY: the shim's bytes live through the call.
    let bytes = unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), count) };
    // A panic of the writer must not run through C++.
    sink.result = catch_unwind(AssertUnwindSafe(|| sink.writer.write_all(bytes)))
        .unwrap_or_else(|_| Err(std::io::Error::other("the writer panicked")));
}
