//! A policy as a file again.

use std::io::{BufWriter, Write};
use std::path::Path;

use super::{Parameter, Policy};
use crate::error::{Error, Result};

impl Policy {
    /// Writes the policy with its present weights as TorchScript, which `torch.jit.load` and
    /// [`load`](Self::load) read. Tied weights stay tied; dtype and device are those it runs in; it
    /// is saved in eval mode. Parameters that were left out by
    /// [`trainable`](super::PolicyOptions::trainable) require a gradient in the file if they did in
    /// the file that it came from.
    ///
    /// # Errors
    /// If the writer or libtorch fails.
    pub fn write_to(&self, writer: &mut dyn Write) -> std::io::Result<()> {
        let _as_in_file = GradientFlags::as_in_file(&self.parameters);
        self.module.save(writer)
    }

    /// Saves the policy as [`write_to`](Self::write_to) writes it. The file is put in place in one
    /// move, once it is whole.
    ///
    /// # Errors
    /// If it cannot be written; an earlier file of that name is then untouched.
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut name = path.file_name().unwrap_or_default().to_os_string();
        name.push(format!(".{}.partial", std::process::id()));
        let beside = path.with_file_name(name);
        let write = || -> std::io::Result<()> {
            let mut file = BufWriter::new(std::fs::File::create(&beside)?);
            self.write_to(&mut file)?;
            file.flush()?;
            file.get_ref().sync_all()?;
            std::fs::rename(&beside, path)
        };
        write().map_err(|cause| {
            let _ = std::fs::remove_file(&beside);
            Error::io("write", path)(cause)
        })
    }
}

impl Policy {
    /// Takes over the weights of another policy of the same parameters, on its own device and in its own
    /// dtype. Buffers stay as they are.
    ///
    /// # Errors
    /// If the names or shapes of the parameters differ; nothing is changed then.
    pub fn copy_weights(&mut self, other: &Self) -> Result<()> {
        let pairs = || self.parameters.iter().zip(&other.parameters);
        let is_alike = self.parameters.len() == other.parameters.len()
            && pairs()
                .all(|(own, new)| own.names == new.names && own.tensor.size() == new.tensor.size());
        if !is_alike {
            return Err(Error::checkpoint(
                &self.path,
                format!("expected the parameters of {}, found others", other.path.display()),
            ));
        }
        let _no_grad = tch::no_grad_guard();
        for (own, new) in pairs() {
            own.tensor.shallow_clone().f_copy_(&new.tensor)?;
        }
        Ok(())
    }
}

/// The parameters require gradients as their file says, until this is dropped.
struct GradientFlags<'a>(Vec<&'a Parameter>);

impl<'a> GradientFlags<'a> {
    fn as_in_file(parameters: &'a [Parameter]) -> Self {
        let left_out = |parameter: &&Parameter| {
            parameter.requires_grad_in_file && !parameter.tensor.requires_grad()
        };
        let changed: Vec<&Parameter> = parameters.iter().filter(left_out).collect();
        set(&changed, true);
        Self(changed)
    }
}

impl Drop for GradientFlags<'_> {
    fn drop(&mut self) {
        set(&self.0, false);
    }
}

fn set(parameters: &[&Parameter], requires_grad: bool) {
    for parameter in parameters {
        let _ = parameter.tensor.set_requires_grad(requires_grad);
    }
}
