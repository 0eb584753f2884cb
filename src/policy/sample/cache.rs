//! The key-value cache: finding a module's method for it, calling it, and holding it to forward.

use std::collections::HashMap;

use tch::{Kind, Tensor};

use super::super::{Policy, check, signature};
use crate::error::{Error, Result};
use crate::native::Module;

/// The method that a module may offer.
pub(in super::super) const CACHED_SCHEMA: &str = "forward_cached(input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: List[Tensor]) -> Tuple[Tensor, List[Tensor]]";

/// What a module has under that name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) enum CacheMethod {
    Missing,
    Usable,
    /// A method of another schema, as written in Python.
    Other(String),
}

/// Looks for the method. The names of its arguments are free.
pub(in super::super) fn find_cache(module: &Module) -> std::result::Result<CacheMethod, String> {
    let Some((arguments, result)) = module.signature("forward_cached")? else {
        return Ok(CacheMethod::Missing);
    };
    let types: Vec<&str> = arguments.iter().map(|argument| argument.type_name.as_str()).collect();
    Ok(match (types.as_slice(), result.as_str()) {
        (["Tensor", "Tensor", "Tensor", "List[Tensor]"], "Tuple[Tensor, List[Tensor]]") => {
            CacheMethod::Usable
        }
        _ => CacheMethod::Other(format!(
            "forward_cached({}) -> {result}",
            signature::list(&arguments)
        )),
    })
}

/// A batch of prefixes that is read once and grows by a token a row.
pub(super) struct CachedPass<'a> {
    policy: &'a Policy,
    cache: Vec<Tensor>,
    /// `[B, P]`: the columns in the cache.
    mask: Tensor,
}

impl<'a> CachedPass<'a> {
    /// Reads the prefixes, equal ones once; gives the logits `[B, V]` of what follows each.
    pub fn start(policy: &'a Policy, prefixes: &[&[i64]]) -> Result<(Self, Tensor)> {
        let mut places = HashMap::new();
        let mut different = Vec::new();
        let mut rows = Vec::with_capacity(prefixes.len());
        for prefix in prefixes {
            rows.push(*places.entry(prefix).or_insert_with(|| {
                different.push(*prefix);
                different.len() as i64 - 1
            }));
        }
        let (mut pass, logits) = Self::read(policy, &different)?;
        if different.len() == prefixes.len() {
            return Ok((pass, logits));
        }
        let rows = Tensor::from_slice(&rows).to_device(policy.device());
        pass.select(&rows)?;
        Ok((pass, logits.f_index_select(0, &rows)?))
    }

    fn read(policy: &'a Policy, prefixes: &[&[i64]]) -> Result<(Self, Tensor)> {
        let longest = prefixes.iter().map(|prefix| prefix.len()).max().unwrap_or(0);
        let (mut ids, mut mask) = (Vec::new(), Vec::new());
        for (row, prefix) in prefixes.iter().enumerate() {
            let end = (row + 1) * longest;
            ids.resize(end - prefix.len(), 0);
            mask.resize(end - prefix.len(), 0);
            ids.extend_from_slice(prefix);
            mask.resize(end, 1);
        }
        let size = [prefixes.len() as i64, longest as i64];
        let tensor = |numbers: &[i64]| {
            Tensor::from_slice(numbers).to_device(policy.device()).f_reshape(size)
        };
        let (ids, mask) = (tensor(&ids)?, tensor(&mask)?);
        let positions = (mask.cumsum(-1, Kind::Int64) - 1).clamp_min(0);
        let mut pass = Self { policy, cache: Vec::new(), mask };
        let logits = pass.call(&ids, &positions)?;
        Ok((pass, logits))
    }

    /// Reads one more token a row; gives the logits `[B, V]` of what follows.
    pub fn next(&mut self, tokens: &[i64]) -> Result<Tensor> {
        let ids = Tensor::from_slice(tokens).to_device(self.policy.device()).unsqueeze(-1);
        let positions = self.mask.sum_dim_intlist(-1, true, Kind::Int64);
        self.mask = Tensor::f_cat(&[&self.mask, &ids.ones_like()], -1)?;
        self.call(&ids, &positions)
    }

    /// Drops the other rows; `rows` ascend.
    pub fn keep(&mut self, rows: &[i64]) -> Result<()> {
        if rows.len() as i64 == self.mask.size()[0] {
            return Ok(());
        }
        self.select(&Tensor::from_slice(rows).to_device(self.policy.device()))
    }

    fn select(&mut self, rows: &Tensor) -> Result<()> {
        for tensor in self.cache.iter_mut().chain([&mut self.mask]) {
            *tensor = tensor.f_index_select(0, rows)?;
        }
        Ok(())
    }

    fn call(&mut self, ids: &Tensor, positions: &Tensor) -> Result<Tensor> {
        let Self { policy, mask, .. } = self;
        let (logits, cache) = policy
            .module
            .forward_cached([ids, mask, positions], &self.cache, policy.options.optimize_graph)
            .map_err(|message| Error::torch("calling forward_cached", &message))?;
        let batch = ids.size()[0];
        let expected = [batch, ids.size()[1], policy.choices];
        if !logits.is_floating_point() || logits.size() != expected {
            let found = format!("logits {:?} {:?}", logits.kind(), logits.size());
            return Err(refuse(policy, &format!("expected logits {expected:?}, found {found}")));
        }
        if let Some(tensor) = cache.iter().find(|tensor| tensor.size().first() != Some(&batch)) {
            let found = format!("a tensor {:?} for a batch of {batch}", tensor.size());
            return Err(refuse(
                policy,
                &format!("expected the batch first in its cache, found {found}"),
            ));
        }
        self.cache = cache;
        Ok(logits.select(1, -1))
    }
}

impl Policy {
    /// Holds the cache to forward, once: a padded first call, a token, a row dropped, another token.
    pub(super) fn check_cache(&self, context: &[i64]) -> Result<()> {
        // Two tokens are added, and the rows shall be no longer than what will be sampled anyway.
        let length = context.len().saturating_sub(2).max(2);
        let long: Vec<i64> = context.iter().copied().cycle().take(length).collect();
        let short = long[length / 2..].to_vec();
        let mut rows = vec![long, short];
        let (mut pass, mut found) = CachedPass::start(self, &slices(&rows))?;
        for kept in [&[0, 1][..], &[1]] {
            let expected = self.next_logits(&slices(&rows))?;
            if expected.isnan().any().int64_value(&[]) != 0 {
                // Not the fault of the cache; the draw reports it.
                return Ok(());
            }
            self.compare(&found, &expected)?;
            pass.keep(kept)?;
            rows = kept.iter().map(|row| rows[*row as usize].clone()).collect();
            let likely = expected.argmax(-1, false);
            let tokens: Vec<i64> = kept.iter().map(|row| likely.int64_value(&[*row])).collect();
            for (row, token) in rows.iter_mut().zip(&tokens) {
                row.push(*token);
            }
            found = pass.next(&tokens)?;
        }
        self.compare(&found, &self.next_logits(&slices(&rows))?)?;
        self.cache_is_checked.set(true);
        Ok(())
    }

    fn compare(&self, found: &Tensor, expected: &Tensor) -> Result<()> {
        // Other shapes round in another order. In float64 some models compute parts in float32.
        let rounding = match self.kind {
            Kind::Double => 1e-6,
            Kind::BFloat16 => 1e-1,
            Kind::Half => 2e-2,
            _ => 1e-3,
        };
        let difference = check::largest_difference(found, expected);
        let scale = check::largest_finite(expected);
        // NaN is not within any distance.
        if difference <= rounding * scale {
            return Ok(());
        }
        Err(refuse(
            self,
            &format!(
                "its logits are {difference:.3e} from those of forward, which reach {scale:.3e}"
            ),
        ))
    }
}

fn slices(rows: &[Vec<i64>]) -> Vec<&[i64]> {
    rows.iter().map(Vec::as_slice).collect()
}

fn refuse(policy: &Policy, problem: &str) -> Error {
    Error::checkpoint(
        policy.path(),
        format!(
            "its method forward_cached: {problem}; fix it, or sample without a cache (use_cache: false)"
        ),
    )
}
