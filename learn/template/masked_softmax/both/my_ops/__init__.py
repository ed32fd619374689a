from my_ops._masked_softmax import masked_softmax as masked_softmax
