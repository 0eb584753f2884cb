//! Scoring what could follow a context, of any origin.

use tch::Tensor;

use super::{BatchLogits, Policy, PolicyKind};
use crate::error::{Error, Result};

/// A context, and tokens that follow it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Continuation<'a> {
    /// At least one token id.
    pub context: &'a [i64],
    /// At least one token id.
    pub tokens: &'a [i64],
    /// Which of them are asked for, as many; the others are read only.
    pub asked: &'a [bool],
}

impl Continuation<'_> {
    /// Tokens that a forward pass reads: the last one predicts nothing.
    pub fn forward_tokens(&self) -> usize {
        self.context.len() + self.tokens.len() - 1
    }

    /// The tokens that are asked for.
    pub fn asked(&self) -> usize {
        self.asked.iter().filter(|asked| **asked).count()
    }
}

impl Policy {
    /// The logits from which the tokens asked for are chosen, one continuation after the other, in one
    /// forward pass padded on the right.
    ///
    /// # Errors
    /// If libtorch fails, the policy is no causal language model, or a continuation has no context or
    /// no tokens.
    pub fn continuation_logits(&self, rows: &[Continuation]) -> Result<BatchLogits> {
        let refuse = |expected: &str, found: String| Error::Argument {
            argument: "continuations",
            expected: expected.into(),
            found,
        };
        if self.options.kind != PolicyKind::CausalLm {
            return Err(refuse("a policy of kind causal_lm", "a step policy".into()));
        }
        let is_usable = |row: &Continuation| {
            !row.context.is_empty() && !row.tokens.is_empty() && row.asked.len() == row.tokens.len()
        };
        if let Some(row) = rows.iter().find(|row| !is_usable(row)) {
            return Err(refuse(
                "a context, and tokens with a mask of their length",
                format!("{row:?}"),
            ));
        }
        let device = self.device();
        let tensor = |numbers: &[i64]| Tensor::from_slice(numbers).to_device(device);
        let longest = rows.iter().map(Continuation::forward_tokens).max().unwrap_or(0);
        let mut ids: Vec<i64> = Vec::with_capacity(rows.len() * longest);
        let mut mask: Vec<i64> = Vec::with_capacity(rows.len() * longest);
        let (mut picked, mut actions) = (Vec::new(), Vec::new());
        for (index, row) in rows.iter().enumerate() {
            // The last token of the context predicts the first one after it.
            let first = index * longest + row.context.len() - 1;
            for (place, (token, asked)) in row.tokens.iter().zip(row.asked).enumerate() {
                if *asked {
                    picked.push((first + place) as i64);
                    actions.push(*token);
                }
            }
            ids.extend(row.context.iter().chain(row.tokens).take(row.forward_tokens()));
            mask.resize(ids.len(), 1);
            ids.resize((index + 1) * longest, 0);
            mask.resize(ids.len(), 0);
        }
        let size = [rows.len() as i64, longest as i64];
        let (ids, mask) = (tensor(&ids).f_reshape(size)?, tensor(&mask).f_reshape(size)?);
        let logits = self.token_logits(&ids, &mask)?.f_reshape([-1, self.choices])?;
        Ok(BatchLogits {
            logits: logits.f_index_select(0, &tensor(&picked))?,
            actions: tensor(&actions),
        })
    }
}
